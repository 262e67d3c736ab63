"""Races put in by hand: a wait or a word to the allocator is taken away, and tests on a played card must see it.

    python -m tests.races [--seed 7] [--count 10] [--all]      draws so many, or tries all; ends in 1 if one is not seen

Of the package's lines these are drawn: `a.wait_stream(b)`, `a.wait_event(e)`, `x.record_stream(a)`, `e.synchronize()`
(the memory behind the event is used too early), and those below by hand, such as a collective that one rank swaps.
"""

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.mutants import ROOMS, ROOT, Change, copied
from tools.played_card.build import environment

__all__ = ["BY_HAND", "SPARED", "races", "seen"]

WORDS = {"wait_event", "wait_stream", "record_stream", "synchronize"}
ORDERS = ("tests/card/test_orders.py",)
SEEDS = (0, 1, 2)  # of the order in which kernels run; a race is seen under one of them
LIMIT = 300.0

# What takes its place elsewhere, so that nothing is wrong without it.
SPARED = {
    "stream.wait_event(begin)": "a copy from the host begins no sooner than asked, so that it takes no memory before",
    "kind.module.synchronize(device)": "for memory that a real card holds back before a graph is recorded",
}
# Clocks that are read before the work that they time has ended: a played card has no times to be wrong.
TIMED = {"placement/measure.py", "placement/compute/timing.py"}
BY_HAND = (
    Change(
        "boxing/exchange/collectives.py",
        "    return _all_gather(sent, exchange) if program.gathers else _all_to_all(sent, exchange)",
        "    swapped = torch.distributed.get_rank() == 1\n"
        "    return _all_gather(sent, exchange) if program.gathers != swapped else _all_to_all(sent, exchange)",
        ("tests/gpu/test_boxing_cuda.py", "-k", "nccl and 2"),
    ),
    Change(
        "boxing/exchange/dist.py",
        "                    work.wait() if self.limit is None else work.wait(self.limit)",
        "                    None if self.limit is None else work.wait(self.limit)",
        ("tests/gpu/test_boxing_cuda.py", "-k", "nccl and 2"),
    ),
    Change(
        "actors/runtime/card.py",
        "            self.work.wait()",
        "            pass",
        ("tests/gpu/test_actors_cuda.py", "-k", "nccl"),
    ),
)


def races() -> Iterator[Change]:
    """Every one, in the order of the files."""
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        if not any(f".{word}(" in source for word in WORDS) or str(path.relative_to(ROOT)) in TIMED:
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
                named = isinstance(call.func, ast.Attribute) and call.func.attr in WORDS
                line = lines[node.lineno - 1]
                if named and line.partition("  #")[0].strip() not in SPARED and node.lineno == node.end_lineno:
                    yield placed(path, lines, node.lineno - 1, line[: node.col_offset] + "pass")
    yield from BY_HAND


def placed(path: Path, lines: list[str], at: int, after: str) -> Change:
    """The change of a line, told with as many lines before it as make it the only one of its kind."""
    text = "\n" + "\n".join(lines) + "\n"
    first = at
    while text.count("\n" + "\n".join(lines[first : at + 1]) + "\n") > 1:
        first -= 1
    before, kept = "\n".join(lines[first : at + 1]), lines[first:at]
    return Change(str(path.relative_to(ROOT)), before, "\n".join([*kept, after]), ORDERS)


def seen(change: Change, tree: Path) -> str:
    """The line by which a test fails in this copy of the repository, once it has the change; else nothing."""
    path = tree / change.path
    source = path.read_text(encoding="utf-8")
    changed = f"\n{source}".replace(f"\n{change.before}\n", f"\n{change.after}\n")[1:]
    assert changed != source, change
    path.write_text(changed, encoding="utf-8")
    try:
        return next(filter(None, (failure(change, tree, seed) for seed in SEEDS)), "")
    finally:
        path.write_text(source, encoding="utf-8")


def failure(change: Change, tree: Path, seed: int) -> str:
    played = environment(seed=seed)
    played["PYTHONPATH"] = os.pathsep.join([str(tree), *played["PYTHONPATH"].split(os.pathsep)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *change.tests]
    more = played | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | more, capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "it never ended"
    if not done.returncode:
        return ""
    told = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    return (told or [done.stdout[-500:] + done.stderr[-500:]])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    every = list(races())
    those = every if options.all else random.Random(options.seed).sample(every, options.count)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="sbpflow-races-") as place:
        tree = copied(Path(place))
        for tests in sorted({change.tests for change in those}):  # which pass as things are
            nothing = replace(those[0], tests=tests)
            assert not (found := failure(nothing, tree, 0)), found
        for change in those:
            found = seen(change, tree)
            missed += not found
            print(f"{'seen' if found else 'NOT SEEN'}: {change}\n{found}\n", flush=True)
    print(f"{len(those) - missed} of {len(those)} seen")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
