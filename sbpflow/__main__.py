"""The command line: `python -m sbpflow doctor` and `python -m sbpflow demo`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .placement.errors import SbpflowError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 2 for what the user can mend, said without a traceback."""
    parser = _parser()
    asked = parser.parse_args(argv)
    try:
        if asked.command == "doctor":
            if asked.save and not asked.measure:
                parser.error("--save FILE writes what --measure finds: give both")
            doctor(ranks=asked.ranks if asked.measure else None, save=asked.save)
        else:
            from .boxing.demo import demo  # here, so that the doctor also runs where the rest does not

            demo(asked.out)
    except SbpflowError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def doctor(*, ranks: int | None, save: Path | None) -> None:
    """Print what is here and what is missing; with `ranks`, also measure between so many processes."""
    from .placement.doctor import report

    print(report())
    if ranks is None:
        return
    from .placement.measure import measure

    measured = measure(ranks)
    print(f"\n{measured}")
    if save is not None:
        measured.cluster().save(save)
        print(f"wrote {save}: use it by flow.use_cluster({str(save)!r})")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sbpflow", description="Global tensors on many ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    healing = commands.add_parser("doctor", help="say what this machine has and what is missing")
    healing.add_argument("--measure", action="store_true", help="time the transport between local processes")
    healing.add_argument("--ranks", type=int, default=2, metavar="N", help="processes to measure between (default 2)")
    healing.add_argument("--save", type=Path, metavar="FILE", help="write what was measured as a cluster (.toml)")
    showing = commands.add_parser("demo", help="show every move between two signatures on four simulated ranks")
    showing.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder for pictures (default out)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
