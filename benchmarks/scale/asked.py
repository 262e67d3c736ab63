"""One run asked in a process of its own, and remembered by all that its answer depends on.

That is the model, the plan, the cluster, and our code. Of a row that does not say how it was run, every run that may
have been meant is asked, and the quickest that fits the card answers.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from .hardware import cluster_of
from .plans import plan_of
from .setting import Architecture, Published, Run

__all__ = ["Answer", "asked", "known", "quickest"]

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("placement", "sbp", "boxing", "actors", "nn")
# What else reads and tells, or stands in the plan and the cluster.
OURS = ("asked.py", "families.py", "models.py", "titan.py")
MIXTURES = ("mixtures.py",)  # of models of experts
Answer = Mapping[str, Any]
LONGEST = 280  # seconds of the clock


def known(row: Published) -> tuple[Published, Answer] | None:
    """The row with the run that was meant, and its answer, if this code was asked before."""
    found = [_known(row.architecture, run) for run in (row.run, *row.others)]
    answers = [answer for answer in found if answer is not None]
    return quickest(row, answers) if len(answers) == len(found) else None


def asked(row: Published, number: int, longest: float = LONGEST) -> tuple[Published, Answer]:
    """The same, by processes that have nothing else to do: seconds, memory, parts, or the error."""
    return quickest(row, [_asked(row, number, at, longest) for at in range(1 + len(row.others))])


def quickest(row: Published, answers: list[Answer]) -> tuple[Published, Answer]:
    """The row as run in the least time of the runs that fit, or of all where none does, and its answer."""
    runs = (row.run, *row.others)
    told = [at for at, answer in enumerate(answers) if "seconds" in answer]
    fit = [at for at in told if answers[at]["fits"]]
    best = min(fit or told, key=lambda at: float(answers[at]["seconds"]), default=0)
    if len(runs) == 1:
        return row, answers[best]
    run, many = runs[best], f"{len(fit)} runs that fit" if fit else f"{len(told)} runs, none of which is told to fit"
    taken = f"{run.samples} sample{'s' * (run.samples > 1)}, v={run.chunks}, the quickest of {many}"
    return replace(row, run=run, assumed=f"{taken}; {row.assumed}"), answers[best]


def _known(of: Architecture, run: Run) -> Answer | None:
    file = _file(of, run)
    found: Answer | None = json.loads(file.read_text()) if file.exists() else None
    return found


def _asked(row: Published, number: int, at: int, longest: float) -> Answer:
    run = (row.run, *row.others)[at]
    before = _known(row.architecture, run)
    if before is not None and longest <= before.get("longest", longest):
        return before
    command = [sys.executable, "-m", "benchmarks.scale.asked", row.table, str(number), str(at)]
    start = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=longest, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        answer: Answer = {"error": f"no answer in {longest:.0f} s", "longest": longest}
    else:
        answer = {**_read(ran), "clock": time.monotonic() - start}
    if "seconds" in answer or "longest" in answer:  # other errors are asked again
        _file(row.architecture, run).parent.mkdir(exist_ok=True)
        _file(row.architecture, run).write_text(json.dumps(answer))
    return answer


def _read(ran: "subprocess.CompletedProcess[str]") -> Answer:
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        return {"error": next((line for line in lines if "Error" in line), lines[-1] if lines else "ended")}
    answer: Answer = json.loads(ran.stdout.splitlines()[-1])
    return answer


def _file(of: Architecture, run: Run) -> Path:
    said = (_code(of.experts > 0), of, run.batch, run.compiled, plan_of(of, run), cluster_of(run))
    key = hashlib.sha256("\n".join(map(str, said)).encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / "sbpflow-scale" / f"{key}.json"


@cache
def _code(experts: bool) -> str:
    """The text of our rooms now, as a number."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".rules", ".lark", ".toml"):
                found.update(path.read_bytes())
    for name in (*OURS, *(MIXTURES if experts else ())):
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()


def _answer(of: Architecture, run: Run) -> Answer:
    import torch

    import sbpflow as flow
    from sbpflow.boxing.graph.report.step_parts import step_parts
    from sbpflow.nn.graph.compiler.backends import Backend
    from sbpflow.nn.plan.check import checked_step, planned_step, priced_by
    from sbpflow.placement.hardware import GAPS, KEPT_FREE

    from .families import loss_of, made

    model = made(of)
    tokens = torch.empty(run.batch, of.length, dtype=torch.long, device="meta")
    start = time.process_time()
    plan = flow.Plan.read(plan_of(of, run))
    batch = {"tokens": tokens, "targets": torch.empty_like(tokens)}
    backend: Backend = "auto" if run.compiled else "code"
    with priced_by(cluster_of(run)):  # what `plan.check` does, but for its look at axes that do nothing
        step = planned_step(plan, model, batch, loss_fn=loss_of, backend=backend)
        checked = checked_step(plan, step, model, batch, loss_fn=loss_of, idle=False)
    report = checked.report
    course = report.course
    ranks = report.memory.ranks.values() if report.memory else ()
    fullest = max(ranks, key=lambda held: held.total, default=None)
    parts = step_parts(report)
    spent = time.process_time() - start
    return {
        "seconds": checked.seconds,
        "memory": checked.memory,
        "taken": checked.taken(GAPS),
        "used": checked.taken(GAPS) + KEPT_FREE * checked.device.memory,
        "fits": checked.fits,
        "held": fullest and asdict(fullest),
        "parts": parts,
        "exposed": report.exposed,
        "hidden": report.hidden,
        "stages": [seconds for _, seconds in course.stages] if course else [],
        "bubble": course.bubble if course else 0.0,
        "once": course.once if course else report.once,
        "processor": spent,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    from .rows import rows

    table, number, at = sys.argv[1:]
    row = rows(table)[int(number)]
    print(json.dumps(_answer(row.architecture, (row.run, *row.others)[int(at)]), default=str))
