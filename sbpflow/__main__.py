"""The command line: `python -m sbpflow demo`, `doctor`, `plan`, `draw`, `diff`, `simulate` and `island`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .placement.errors import PlacementError, SbpflowError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 2 for what the user can mend, said without a traceback."""
    parser = _parser()
    asked = parser.parse_args(argv)
    try:
        if asked.command == "doctor":
            if not asked.measure and (asked.save or asked.ranks):
                parser.error("--save FILE and --ranks N are for what --measure finds: give that too")
            doctor(measuring=asked.measure, ranks=asked.ranks, save=asked.save)
        elif asked.command in ("plan", "draw", "diff") or getattr(asked, "plan", None) is not None:
            from .nn.plan.command import run_command

            run_command(asked)
        elif asked.command == "simulate":
            simulate(asked.schedule, asked.p, asked.m, v=asked.v, n=asked.n, svg=asked.svg)
        elif asked.command == "island":
            from .nn.islands.serve import serve

            serve(asked.address, asked.file, timeout=asked.timeout)
        else:
            from .boxing.demo import demo  # here, so that the doctor also runs where the rest does not

            demo(asked.out)
    except SbpflowError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def doctor(*, measuring: str | None, ranks: int | None, save: Path | None) -> None:
    """Print what is here and what is missing, and measure: links of the run, or between local processes, and what
    their devices reach; or the links alone."""
    from .placement.doctor import report
    from .placement.measure import measure, measure_run

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and measuring:
        if ranks is not None:
            raise PlacementError("--ranks N starts processes of this machine\n  under torchrun, its own are measured")
        measured, save = measure_run(kernels=measuring == "all"), save or Path("cluster.toml")
        if os.environ["RANK"] != "0":
            return
        print(f"{report()}\n\n{measured}")
    else:
        print(report())
        if not measuring:
            return
        measured = measure(ranks, kernels=measuring == "all")
        print(f"\n{measured}")
    if save is not None:
        measured.cluster().save(save)
        print(f"wrote {save}: use it by SBPFLOW_CLUSTER={save}, or flow.use_cluster({str(save)!r})")


def simulate(name: str, p: int | None, m: int | None, *, v: int, n: int, svg: Path | None) -> None:
    """Print what a schedule would do; it is a published one by its name, or a file's."""
    from .actors import Schedule, published

    schedule = Schedule.read(Path(name).read_text(encoding="utf-8")) if Path(name).is_file() else published(name)
    usual = (0, 0) if schedule.table else (4, 8)  # a table says both itself
    shown = schedule.show(p or usual[0], m or usual[1], v=v, n=n)
    print(shown)
    if svg is not None:
        print(f"drew {shown.draw(svg)}")


def _parser() -> argparse.ArgumentParser:
    from .nn.plan.command import add_commands, add_model

    parser = argparse.ArgumentParser(prog="python -m sbpflow", description="Global tensors on many ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    healing = commands.add_parser("doctor", help="say what this machine has and what is missing")
    healing.add_argument(
        "--measure",
        nargs="?",
        const="all",
        choices=("all", "links"),
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
    trying.add_argument("schedule", metavar="NAME", help="a published one, such as 1f1b or zb_h1, a file; or a model")
    add_model(trying)
    trying.add_argument("-p", type=_count, help="devices (default 4)")
    trying.add_argument("-m", type=_count, help="micro-batches (default 8)")
    trying.add_argument("-v", type=_count, default=0, help="chunks on each device, if not as usual")
    trying.add_argument("-n", type=_count, default=1, help="slices of each sequence (default 1)")
    trying.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    serving = commands.add_parser("island", help="be ranks that run the programs of other processes (under torchrun)")
    serving.add_argument("--address", default="localhost:0", metavar="HOST:PORT", help="where to listen (a free port)")
    serving.add_argument(
        "--file", type=Path, default=Path("island.json"), metavar="FILE", help="by which clients find it (island.json)"
    )
    serving.add_argument("--timeout", type=float, metavar="SECONDS", help="for any one move, as in flow.init")
    add_commands(commands)
    return parser


def _count(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
