"""The command line, `python -m sbpflow`: `doctor`, `demo`, `simulate`, `island`, and those of a model under a plan."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ._interrupt import STOPPED, raised
from .placement.errors import PlacementError, SbpflowError

if TYPE_CHECKING:
    from .nn.plan.commands.words import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 2 for what the user can mend, said without a traceback."""
    try:
        raised()
        parser = _parser()
        asked = parser.read(argv)
        if asked.command == "doctor":
            if not asked.measure and (asked.save or asked.ranks):
                parser.error("--save FILE and --ranks N are for what --measure finds: give that too")
            doctor(measuring=asked.measure, ranks=asked.ranks, save=asked.save, as_json=asked.json)
        elif asked.command == "island":
            from .nn.islands.serve import serve

            serve(asked.address, asked.file, timeout=asked.timeout)
        elif asked.command == "demo":
            from .boxing.demo import demo  # here, so that the doctor also runs where the rest does not

            demo(asked.out, as_json=asked.json)
        elif asked.command == "simulate" and asked.plan is None:
            simulate(asked.schedule, asked.p, asked.m, v=asked.v, n=asked.n, svg=asked.svg, as_json=asked.json)
        else:
            from .nn.plan.commands.subcommands import run_command

            run_command(asked)
    except SbpflowError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)  # of what was read or written by its name
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    return 0


def doctor(*, measuring: str | None, ranks: int | None, save: Path | None, as_json: bool = False) -> None:
    """Print what is here and what is missing, and measure: links of the run, or between local processes, and what
    their devices reach; or the links alone."""
    from .placement.doctor import findings, report
    from .placement.measure import measure, measure_run

    measured = None
    if measuring and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if ranks is not None:
            raise PlacementError("--ranks N starts processes of this machine\n  under torchrun, its own are measured")
        measured, save = measure_run(kernels=measuring == "all"), save or Path("cluster.toml")
        if os.environ["RANK"] != "0":
            return
    if as_json:
        measured = measure(ranks, kernels=measuring == "all") if measuring and measured is None else measured
        here = [asdict(one) for one in findings()]
        print(json.dumps({"findings": here, "measured": measured and str(measured)}, indent=1))
    else:
        print(report(), flush=True)
        if measuring:
            measured = measured or measure(ranks, kernels=measuring == "all")
            print(f"\n{measured}")
    if measured is not None and save is not None:
        measured.cluster().save(save)
        told = f"wrote {save}: use it by SBPFLOW_CLUSTER={save}, or flow.use_cluster({str(save)!r})"
        print(told, file=sys.stderr if as_json else sys.stdout)


def simulate(
    name: str, p: int | None, m: int | None, *, v: int, n: int, svg: Path | None, as_json: bool = False
) -> None:
    """Print what a schedule would do; it is a published one by its name, or a file's."""
    from .actors import Schedule, published

    schedule = Schedule.read(Path(name).read_text(encoding="utf-8")) if Path(name).is_file() else published(name)
    usual = (0, 0) if schedule.table else (4, 8)  # a table says both itself
    shown = schedule.show(p or usual[0], m or usual[1], v=v, n=n)
    print(json.dumps(shown.dict(), indent=1) if as_json else shown)
    if svg is not None:
        print(f"drew {shown.draw(svg)}", file=sys.stderr if as_json else sys.stdout)


def _parser() -> "CommandParser":
    from .nn.plan.commands.subcommands import add_commands, add_model
    from .nn.plan.commands.words import CommandParser, count, one_of

    parser = CommandParser(prog="python -m sbpflow", description="Global tensors on many ranks.")
    commands = parser.add_commands()
    healing = commands.add_parser("doctor", help="say what this machine has and what is missing")
    healing.add_argument(
        "--measure",
        nargs="?",
        const="all",
        type=one_of("all", "links"),
        metavar="{all,links}",
        help="time the links of a run under torchrun, or of this machine, and what devices reach, or links alone",
    )
    healing.add_argument("--ranks", type=int, metavar="N", help="without torchrun, how many processes (2)")
    healing.add_argument(
        "--save",
        "--out",
        type=Path,
        metavar="FILE",
        help="write what was measured as a cluster (a run's: cluster.toml)",
    )
    showing = commands.add_parser("demo", help="show every move between two signatures on four simulated ranks")
    showing.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder for pictures (default out)"
    )
    trying = commands.add_parser("simulate", help="show what a pipeline's schedule would do, and when")
    for each in (healing, showing, trying):
        each.add_argument("--json", action="store_true", help="print the answer as json")
    trying.add_argument("schedule", metavar="NAME", help="a published one, such as 1f1b or zb_h1, a file; or a model")
    add_model(trying)
    trying.add_argument("-p", type=count, help="devices (default 4)")
    trying.add_argument("-m", type=count, help="micro-batches (default 8)")
    trying.add_argument("-v", type=count, default=0, help="chunks on each device, if not as usual")
    trying.add_argument("-n", type=count, default=1, help="slices of each sequence (default 1)")
    trying.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    serving = commands.add_parser("island", help="be ranks that run the programs of other processes (under torchrun)")
    serving.add_argument("--address", default="localhost:0", metavar="HOST:PORT", help="where to listen (a free port)")
    serving.add_argument(
        "--file", type=Path, default=Path("island.json"), metavar="FILE", help="by which clients find it (island.json)"
    )
    serving.add_argument("--timeout", type=float, metavar="SECONDS", help="for any one move, as in flow.init")
    add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
