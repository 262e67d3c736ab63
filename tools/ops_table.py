"""Write docs/evidence/ops.md: what came of every op of PyTorch's op database on global tensors.

    python -m tests.nn.opdb --out ops.json
    python tools/ops_table.py ops.json

The first takes some minutes; the second only writes.
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "ops.md"

TOP = """# Operators

Every operator that PyTorch's own tests know for float32 ([`op_db`][op_db]), run on global tensors over {ranks} ranks,
torch {torch}. This page is generated:

```sh
{commands}
```

- An op runs on several samples of PyTorch's tests under several combinations of layouts: each tensor argument is B,
  S(d) on any dim, also where sizes do not divide or ranks stay empty, or P. Values and gradients must be those of plain
  torch on one device, random numbers included.
- **forward**, **backward**: *right* in all combinations; otherwise how many were. An entry is empty where plain torch
  has no gradient.
- **stays split**: the dims of an input, of how many, on which it may be split such that nothing is sent and the result
  is split too (or partial). Where no dim does, the op gathers what it needs.

{summary}

"""
END = """
[op_db]: https://github.com/pytorch/pytorch/blob/main/torch/testing/_internal/common_methods_invocations.py
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what `python -m tests.nn.opdb --out` wrote")
    page(json.loads(parser.parse_args().results.read_text()))


def page(results: dict[str, Any]) -> None:
    ops = {name: op for name, op in results["ops"].items() if not op["skipped"]}
    rows = [["op", "forward", "backward", "stays split"]]
    rows += [[name, state(op, "forward"), state(op, "backward"), stays(op["stays"])] for name, op in ops.items()]
    commands = "\n".join(line.strip() for line in (__doc__ or "").splitlines() if line.startswith("    "))
    top = TOP.format(ranks=results["ranks"], torch=results["torch"], commands=commands, summary=summary(ops))
    DOCS.write_text(top + "\n".join(aligned(rows)) + "\n" + END, encoding="utf-8")


def summary(ops: dict[str, Any]) -> str:
    forward = sum(right(op["forward"]) for op in ops.values())
    both = sum(right(op["forward"]) and op["backward"][0] == op["backward"][1] for op in ops.values())
    wrong = sum(bool(op["wrong"]) for op in ops.values())
    split = sum(op["stays"] is not None for op in ops.values())
    found = (
        f"Of {len(ops)} ops {forward} are right forward, {both} forward and backward, {split} stay split on some dim; "
        f"{wrong} give a wrong value without saying so."
    )
    return textwrap.fill(found, 120)


def right(pair: list[int]) -> bool:
    return pair[0] == pair[1] > 0


def state(op: dict[str, Any], direction: str) -> str:
    done, of = op[direction]
    if not of:
        return ""
    wrong = sum(text.startswith(direction) for text in op["wrong"])
    return "right" if done == of else f"{done} of {of}" + (f", {wrong} wrong" if wrong else "")


def stays(found: list[Any] | None) -> str:
    return f"{', '.join(map(str, found[1]))} of {found[0]}" if found else ""


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(entry.ljust(w) for entry, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


if __name__ == "__main__":
    main()
