"""Programs to run and plans to read, by their names: `python -m sbpflow.examples` lists them."""

from pathlib import Path

__all__ = ["PLANS", "PROGRAMS"]

_HERE = Path(__file__).parent
PROGRAMS = {path.stem: path for path in sorted(_HERE.glob("[!_]*.py"))}
PLANS = {path.stem: path for path in sorted(_HERE.glob("plans/*.plan"))}
