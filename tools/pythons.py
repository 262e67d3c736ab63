"""A wheel in a fresh environment of each Python from 3.11 to 3.14 that is here, away from the tree.

    python -m tools.pythons dist/sbpflow-0.1.0-py3-none-any.whl
    python -m tools.pythons dist/sbpflow-0.1.0-py3-none-any.whl environments/3.13/bin/python

Nothing is downloaded: the needs are those that an interpreter has, which may be that of an environment. One that is
missing, or has no torch, is passed over with a word.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["NAMES", "all_tried", "tried"]

NAMES = [f"python3.{minor}" for minor in range(11, 15)]
ASK = """
import os, sys, torch
paths = [path for path in sys.path if path.endswith("site-packages")]
print(sys.version.split()[0], torch.__version__, os.pathsep.join(paths), sep="\\n")
"""
TRY = """
import torch
import sbpflow as flow
print(flow.ones(4, placement=flow.placement("cpu", range(2)), sbp=flow.S(0)).sum().item())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
x = torch.ones(6, 4)
alone = model(x).square().mean().item()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plan = "grid cpu (pipe=2)\\nplace 0 at pipe=0\\nplace [1:] at pipe=1\\n2 micro-batches"
step = flow.compile(model, lambda model, x: model(x).square().mean(), optimizer, plan=plan)
first, second = step(x).item(), step(x).item()
print(abs(first - alone) < 1e-6, second < first)
"""
SAID = "4.0\nTrue True\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pythons", nargs="*", help="interpreters besides this one and those of the PATH")
    asked = parser.parse_args()
    failed = False
    for name, said in all_tried(asked.wheel, [sys.executable, *NAMES, *asked.pythons]):
        print(f"{name}: {said}", flush=True)
        failed |= said.startswith("FAILED")
    return int(failed)


def all_tried(wheel: Path, pythons: Sequence[str]) -> Iterator[tuple[str, str]]:
    for python in pythons:
        with tempfile.TemporaryDirectory() as home:
            yield python, tried(wheel, python, Path(home))


def tried(wheel: Path, python: str, home: Path) -> str:
    """The outcome in a line: well, FAILED, or passed over."""
    try:
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
        if asked.returncode and "No module named 'torch'" not in asked.stderr:
            return "passed over, it does not run here"
    except FileNotFoundError:
        return "passed over, it is not here"
    if asked.returncode:
        return "passed over, it has no torch"
    version, torch, paths = asked.stdout.splitlines()
    subprocess.run([python, "-m", "venv", str(home)], check=True)
    fresh = home / "bin" / "python"
    subprocess.run([fresh, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(paths.replace(":", "\n"))
    for words in (["-c", TRY], ["-m", "sbpflow", "demo"], ["-m", "sbpflow.examples", "mlp"]):
        done = subprocess.run([fresh, *words], cwd=home, env={}, capture_output=True, text=True, check=False)
        if done.returncode or (words[1] == TRY and done.stdout != SAID):
            return f"FAILED, Python {version} with torch {torch}\n{done.stdout}{done.stderr}"
    return f"well, Python {version} with torch {torch}: a tensor, a step in stages, the demo, an example"


if __name__ == "__main__":
    sys.exit(main())
