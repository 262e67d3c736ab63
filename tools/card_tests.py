"""Ordinary tests as a card runs them: in a copy of the repository "cpu" is "cuda", and what is made lies on the card.

    python -m tools.card_tests [--into DIR] [--ranks] [--sample N] [what pytest takes, such as tests/nn/tensors -n 8]

Where there is no card, a played one serves: python -m tools.played_card python -m tools.card_tests tests/nn/tensors
With --ranks only tests on real ranks run, over NCCL: they share the card, which NCCL takes for cards of as many hosts.
Some tests fail for what they are: they look into a text that says "cpu", count calls, or read a tensor as numpy does.
tools/card_plugin.py has these by general rules, with the reason of each; they are told as expected to fail.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT = shutil.ignore_patterns(".*", "__pycache__", "out", "wheels", "*.egg-info")
STAY = ("card", "gpu")  # folders of tests that say themselves where they run
# A card takes no index that is out of range: what such a test did is an error of all that comes behind it.
POISON = ("tests/sbp/book/test_indexing.py", "tests/nn/checkpoint/folders")
# Offloads go to the "cpu" from anywhere; where they are tested it is a device only in the first argument of these.
DEVICE = r"""(?<!to=)(?<!Offload\()(["'])cpu\b(?!["'], ["']disk)"""
DEVICE_BESIDE_OFFLOADS = r"""(?<=[tr]\()(["'])cpu\b"""
CHANGES = (
    (r"\bcpu(?=:\[| \()", "cuda"),
    (r'(?<!default_)cluster\("cuda', 'cluster("cpu'),
    (r'cluster="cuda', 'cluster="cpu'),
    (r"torch\.Generator\(\)", 'torch.Generator("cuda")'),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="a folder for the copy, which is kept")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as own:
        where = options.into or Path(own) / "copy"
        copied(where)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.card_plugin", *more]
        command += ["-m", "not alone", *(word for each in POISON for word in ("--ignore", each))]
        paths = [str(where), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=where, env=environment, check=False).returncode


def copied(where: Path) -> None:
    shutil.copytree(ROOT, where, symlinks=True, ignore=LEFT)
    for path in (where / "tests").rglob("*.py"):
        if path.relative_to(where / "tests").parts[0] not in STAY:
            path.write_text(on_cards(path.name, path.read_text(encoding="utf-8")), encoding="utf-8")


def on_cards(name: str, text: str) -> str:
    """A test module that lays its tensors on cards, or the one that makes ranks, each of which has a card."""
    if name == "ranks.py":
        text = text.replace('"LOCAL_RANK": str(r)}', '"LOCAL_RANK": str(r), "NCCL_HOSTID": f"host{r}"}')
        return text.replace(
            "    freed = True\n", '    freed = True\n    __import__("torch").set_default_device("cuda")\n'
        )
    device = DEVICE_BESIDE_OFFLOADS if name == "test_offload.py" else DEVICE
    for pattern, by in ((device, r"\1cuda"), *CHANGES):
        text = re.sub(pattern, by, text)
    if name == "conftest.py":
        text = text.replace("\nGRACE =", '\ntorch.set_default_device("cuda")\nGRACE =', 1)
    return text


if __name__ == "__main__":
    sys.exit(main())
