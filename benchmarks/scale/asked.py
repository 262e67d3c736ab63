"""One row asked in a process of its own, and remembered by all that its answer depends on: the row, and our code."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .setting import Published

__all__ = ["Answer", "asked", "known"]

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("placement", "sbp", "boxing", "actors", "nn", "benchmarks/scale")  # what reads and tells aside
ASIDE = ("rows.py", "report.py", "baseline.py", "__main__.py")
Answer = Mapping[str, Any]
LONGEST = 280  # seconds of the clock


def known(row: Published) -> Answer | None:
    """The answer for a row, if this code was asked before."""
    file = _file(row)
    found: Answer | None = json.loads(file.read_text()) if file.exists() else None
    return found


def asked(row: Published, number: int, longest: float = LONGEST) -> Answer:
    """The answer for a row, by a process that has nothing else: seconds, memory, parts, or the error."""
    before = known(row)
    if before is not None:
        return before
    command = [sys.executable, "-m", "benchmarks.scale.asked", row.table, str(number)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=longest, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {longest:.0f} s"}
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        return {"error": next((line for line in lines if "Error" in line), lines[-1] if lines else "ended")}
    answer: Answer = json.loads(ran.stdout.splitlines()[-1])
    _file(row).parent.mkdir(exist_ok=True)
    _file(row).write_text(json.dumps(answer))
    return answer


def _file(row: Published) -> Path:
    key = hashlib.sha256(f"{_code()} {row}".encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / "sbpflow-scale" / f"{key}.json"


@cache
def _code() -> str:
    """The text of our rooms now, as a number."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".rules", ".lark", ".toml") and not (room == ROOMS[-1] and path.name in ASIDE):
                found.update(path.read_bytes())
    return found.hexdigest()


def _answer(row: Published) -> Answer:
    import torch

    import sbpflow as flow
    from sbpflow.nn.graph.compiler.backends import Backend

    from .hardware import cluster_of
    from .models import loss_of, made
    from .plans import plan_of

    model = made(row.architecture)
    tokens = torch.empty(row.run.batch, row.architecture.length, dtype=torch.long, device="meta")
    start = time.process_time()
    plan = flow.Plan.read(plan_of(row.architecture, row.run))
    batch = {"tokens": tokens, "targets": torch.empty_like(tokens)}
    backend: Backend = "auto" if "compile" in row.name else "code"  # else a trainer runs kernels one by one
    cluster = cluster_of(row.run.hardware, row.run.gpus)
    checked = plan.check(model, batch, loss_fn=loss_of, cluster=cluster, backend=backend)
    spent = time.process_time() - start
    report = checked.report
    course = report.course
    parts = {"compute": report.compute, "update": report.update, "exposed": report.exposed, "hidden": report.hidden}
    ops: dict[str, float] = defaultdict(float)
    for op in report.ops:
        ops[op.op] += (op.seconds or 0.0) * op.count
    return {
        "seconds": checked.seconds,
        "memory": checked.memory,
        "parts": parts,
        "ops": dict(ops),
        "moves": {f"{m.direction} {m.route}": m.seconds for m in checked.moves},
        "stages": [seconds for _, seconds in course.stages] if course else [],
        "bubble": course.bubble if course else 0.0,
        "once": course.once if course else report.once,
        "processor": spent,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    from .rows import rows

    print(json.dumps(_answer(rows(sys.argv[1])[int(sys.argv[2])])))
