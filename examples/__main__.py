"""The examples by their names.

python -m sbpflow.examples                     lists them, with a line each
python -m sbpflow.examples gpt --check         runs a program; what is behind the name is its own
torchrun --nproc-per-node 4 -m sbpflow.examples pipeline
python -m sbpflow.examples zero1 > my.plan     prints a plan
python -m sbpflow.examples copy my_examples    copies all of them to a new folder, to change them there
"""

import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from sbpflow.placement.errors import did_you_mean

from . import PLANS, PROGRAMS


def main(words: Sequence[str]) -> int:
    """The exit code: 2 for what the user can mend, as of `python -m sbpflow`."""
    name, *more = words or ("",)
    if name == "copy" and len(more) == 1:
        return _copy(Path(more[0]))
    if name in PROGRAMS:
        path = PROGRAMS[name]
        sys.argv[:] = [str(path), *more]
        sys.path.insert(0, str(path.parent))  # where a program finds those beside it, as if it were started there
        runpy.run_path(str(path), run_name="__main__")
    elif name in PLANS:
        print(PLANS[name].read_text(encoding="utf-8"), end="")
    elif name in ("", "-h", "--help"):
        print(_listed())
    else:
        print(f"no example is called {name!r}\n  {_instead(name)}", file=sys.stderr)
        return 2
    return 0


def _instead(name: str) -> str:
    if name == "copy":
        return "write copy FOLDER"
    return did_you_mean(name, [*PROGRAMS, *PLANS], "without a name it lists them")


def _listed() -> str:
    usage = (__doc__ or "").partition("\n\n")[2]
    programs = [f"  {name:18} {_first(path).removeprefix(chr(34) * 3)}" for name, path in PROGRAMS.items()]
    plans = [f"  {name:18} {_first(path).removeprefix('# ')}" for name, path in PLANS.items()]
    return "\n".join([usage, "programs", *programs, "", "plans", *plans])


def _first(path: Path) -> str:
    """Its first line, which says what it shows."""
    return path.read_text(encoding="utf-8").partition("\n")[0]


def _copy(folder: Path) -> int:
    if folder.exists():
        print(f"{folder} is there already, and what is in it is kept\n  name a new folder", file=sys.stderr)
        return 2
    shutil.copytree(Path(__file__).parent, folder, ignore=shutil.ignore_patterns("__*"))
    print(f"{len(PROGRAMS)} programs and {len(PLANS)} plans are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
