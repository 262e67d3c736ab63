"""Worker processes for the op database, its command line and its report."""

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.nn.opdb import Verdict, database, judge
from tests.nn.systems import RANKS, SYSTEMS

__all__ = ["Results", "main", "run"]

START = 120.0  # seconds that a worker may take to load
FORKS = multiprocessing.get_context("forkserver")  # one process loads the database, which takes seconds
FORKS.set_forkserver_preload(["tests.nn.opdb", "torch.testing._internal.common_methods_invocations"])


class Results(dict[str, Verdict]):
    """Verdicts by op, and the figures that count."""

    @property
    def judged(self) -> dict[str, Verdict]:
        return {name: verdict for name, verdict in self.items() if not verdict.skipped}

    @property
    def figures(self) -> dict[str, int]:
        judged = self.judged.values()
        return {
            "ops": len(judged),
            "forward": sum(v.forward_right for v in judged),
            "both": sum(v.both_right for v in judged),
            "wrong": sum(bool(v.wrong) for v in judged),
            "stays": sum(v.stays is not None for v in judged),
        }

    def report(self) -> str:
        """The figures, then what failed: wrong values first, errors by message, the most frequent first."""
        lines = [", ".join(f"{name} {count}" for name, count in self.figures.items())]
        for name, verdict in sorted(self.judged.items()):
            if verdict.wrong:
                lines += [f"WRONG {name}: {len(verdict.wrong)} times, as in {verdict.wrong[0]}"]
        ops: dict[str, Counter[str]] = defaultdict(Counter)
        example: dict[str, str] = {}
        for name, verdict in self.judged.items():
            for message, count in verdict.errors.items():
                ops[message][name] += count
                example.setdefault(message, f"{name}: {verdict.example.get(message, '')}")
        for message, found in sorted(ops.items(), key=lambda item: -len(item[1])):
            lines += ["", f"{len(found)} ops: {message}", f"    as in {example[message]}", f"    {' '.join(found)}"]
        return "\n".join(lines)


@dataclass
class Worker:
    """A process that judges one op after the other; `op` is what it is at, "" while it loads, None when it is free."""

    system: str
    op: str | None = ""
    gone: bool = False  # whether it closed the pipe
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=work, args=(theirs, self.system), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, op: str) -> None:
        self.op, self.since = op, time.monotonic()
        self.pipe.send(op)

    def late(self, limit: float) -> bool:
        return self.op is not None and time.monotonic() - self.since > (limit if self.op else START)

    def end(self) -> int | None:
        """Its exit status, of its own if it is about to end."""
        self.pipe.close()
        if self.gone:
            self.process.join(START)
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        return code


def work(pipe: Connection, system: str) -> None:
    """A worker's life: tell which ops there are, then judge what comes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Memory that nobody wrote to is nan, so that a kernel which returns it (some do for empty shards) is found out.
    torch.use_deterministic_algorithms(True, warn_only=True)
    ops, under = database(), SYSTEMS[system]()
    pipe.send(list(ops))
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe.send(judge(ops[name], under))


def run(
    ops: Sequence[str] | None = None,
    *,
    sample: int = 0,
    jobs: int = 2,
    limit: float = 180.0,
    system: str = "sbpflow",
    tell: bool = False,
) -> Results:
    """Judge these ops, or all, or a seeded sample. An op that kills its worker is tried once more on a new one."""
    results, workers = Results(), [Worker(system) for _ in range(jobs)]
    todo: list[str] | None = None
    died: Counter[str] = Counter()
    try:
        while todo is None or todo or any(w.op is not None for w in workers):
            for worker in list(workers):
                if worker.op is None and todo:
                    worker.give(todo.pop())
                elif worker.late(limit):
                    assert worker.op, f"a worker took more than {START:g} s to start"
                    results[worker.op] = failed(f"ran longer than {limit:g} s")
                    replace(workers, worker, bool(todo))
            for pipe in wait([w.pipe for w in workers if w.op is not None], 0.5):
                worker = next(w for w in workers if w.pipe is pipe)
                try:
                    answer = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.gone, name = True, worker.op
                    code = worker.end()
                    assert name, f"a worker did not start: exit status {code}"
                    assert todo is not None
                    died[name] += 1
                    if died[name] > 1:
                        results[name] = failed(f"the process died: exit status {code}")
                    else:
                        todo.insert(0, name)
                    replace(workers, worker, bool(todo))
                    continue
                if worker.op:
                    results[worker.op] = answer
                    if tell:
                        show(len(results), worker.op, answer, time.monotonic() - worker.since)
                elif todo is None:
                    todo = chosen(answer, ops, sample)
                worker.op = None
    finally:
        for worker in workers:
            worker.end()
    return Results(sorted(results.items()))


def replace(workers: list[Worker], worker: Worker, needed: bool) -> None:
    """End a worker; a new one is started only if there is something left to do."""
    if not worker.gone:
        worker.end()
    workers.remove(worker)
    if needed:
        workers.append(Worker(worker.system))


def chosen(there: Sequence[str], ops: Sequence[str] | None, sample: int) -> list[str]:
    """The ops to judge, last first."""
    missing = set(ops or ()) - set(there)
    assert not missing, f"no such op: {', '.join(sorted(missing))}"
    if sample:
        generator = torch.Generator().manual_seed(0)
        return [there[int(i)] for i in torch.randperm(len(there), generator=generator)[:sample]]
    return list(ops or there)[::-1]


def failed(message: str) -> Verdict:
    return Verdict(forward=(0, 1), errors={f"forward: {message}": 1})


def show(count: int, name: str, verdict: Verdict, seconds: float) -> None:
    state = verdict.skipped or f"forward {verdict.forward} backward {verdict.backward}"
    bad = "  WRONG" if verdict.wrong else "  error" if verdict.errors else ""
    print(f"{count:4} {name:48} {seconds:6.1f} s  {state}{bad}", file=sys.stderr, flush=True)


def save(results: Mapping[str, Verdict], file: Path) -> None:
    ops: dict[str, Any] = {name: asdict(verdict) for name, verdict in results.items()}
    file.write_text(json.dumps({"torch": torch.__version__, "ranks": RANKS, "ops": ops}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.nn.opdb", description=__doc__)
    parser.add_argument("--ops", nargs="+", metavar="OP", help="names as PyTorch's tests have them; otherwise all")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="a seeded sample of the ops")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that one op may take")
    parser.add_argument("--system", choices=SYSTEMS, default="sbpflow")
    parser.add_argument("--out", type=Path, help="write all verdicts as JSON")
    options = parser.parse_args()
    results = run(
        options.ops, sample=options.sample, jobs=options.jobs, limit=options.limit, system=options.system, tell=True
    )
    if options.out:
        save(results, options.out)
    print(results.report())
