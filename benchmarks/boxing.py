"""Times of `flow.box` on Gloo ranks of this host, beside what else could do the same move in the same minute.

    python benchmarks/boxing.py [--ranks 2 4] [--oneflow VENV] [--quick] [--json FILE] [--write]

box      flow.box, until the values are there
raw      the torch.distributed collective that moves the same bytes, into memory allocated before; none for free moves
hand     the sends, receives and copies that flow.box makes, written out by hand
own      what flow.box takes longer than by hand where the wire answers at once (4 KiB only; larger, memory hides it)
DTensor  DTensor.redistribute
OneFlow  to_global of OneFlow 0.9; VENV is a Python 3.10 with oneflow==0.9.0 and the libraries that it links to,
         nvidia-cudnn-cu11==8.5.0.96 and nvidia-cublas-cu11==11.10.3.66

A session starts the ranks once and goes round by round through every move and way, after a barrier each. The time of
the slowest rank counts. Sessions of OneFlow alternate with ours, so that all meet the same noise.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import sbpflow as flow
from sbpflow.boxing.exchange import execute
from sbpflow.boxing.exchange.dist import Dist
from sbpflow.sbp import Sbp

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "evidence" / "benchmarks.md"
MOVES = ("S0->B", "S1->B", "P->B", "P->S0", "S0->S1", "B->S0", "B->P", "S0->P")
SIZES = {32: ("4 KiB", 50), 512: ("1 MiB", 20), 2048: ("16 MiB", 4)}  # side of a float32 square: logical bytes, calls
SESSIONS, ROUNDS, WARM = 4, 4, 1
SBP: dict[str, Sbp] = {"S0": flow.S(0), "S1": flow.S(1), "B": flow.B, "P": flow.P}
DTENSOR: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "B": Replicate(), "P": Partial()}
TAG = 1

Way: TypeAlias = Callable[[], Any]
Cell: TypeAlias = tuple[int, int, str]  # ranks, side, move
Times: TypeAlias = dict[Cell, dict[str, list[list[float]]]]  # microseconds by way, session and round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--oneflow", type=Path, metavar="VENV", help="also time OneFlow, from this virtual environment")
    parser.add_argument("--quick", action="store_true", help="one short session: whether all runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single time")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/evidence/benchmarks.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        rank(json.loads(options.job))
        return
    times = measured(options.ranks, options.oneflow, quick=options.quick)
    if options.json:
        rows = [[*cell, way, runs] for cell, ways in times.items() for way, runs in ways.items()]
        options.json.write_text(json.dumps({"columns": ["ranks", "side", "move", "way", "us"], "rows": rows}) + "\n")
    report = tables(times)
    print(report)
    if options.write:
        write(report)


def measured(ranks: Sequence[int], oneflow: Path | None, *, quick: bool) -> Times:
    times: Times = defaultdict(lambda: defaultdict(list))
    sizes = [(side, max(1, calls // 5) if quick else calls) for side, (_, calls) in SIZES.items()]
    job = {"sizes": sizes, "moves": MOVES, "rounds": 3 if quick else ROUNDS, "warm": WARM}
    for session in range(1 if quick else SESSIONS):
        for n in ranks:
            for ours in (True, False) if oneflow else (True,):
                began = time.monotonic()
                for side, move, way, us in _session(n, job, None if ours else oneflow):
                    times[n, side, move][way].append(us)
                took, who = time.monotonic() - began, "sbpflow" if ours else "OneFlow"
                print(f"session {session + 1}, {n} ranks, {who}: {took:.0f} s", file=sys.stderr, flush=True)
    return times


def _session(ranks: int, job: dict[str, Any], oneflow: Path | None) -> list[tuple[int, str, str, list[float]]]:
    """Start the ranks and wait: side, move, way, and of each round the slowest rank's time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="sbpflow-bench-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        text, port = json.dumps(job | {"folder": folder}), str(probe.getsockname()[1])
        probe.close()
        if oneflow is None:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            launch += ["--master-addr", "127.0.0.1", "--master-port", port, str(HERE / "boxing.py"), "--job", text]
        else:
            libraries = map(str, oneflow.glob("lib/python3*/site-packages/nvidia/*/lib"))
            environment |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "GLOG_minloglevel": "3"}
            environment.pop("PYTHONPATH", None)
            launch = [str(oneflow / "bin" / "python"), "-m", "oneflow.distributed.launch", "--nproc_per_node"]
            launch += [str(ranks), "--master_port", port, str(HERE / "parts" / "oneflow_boxing.py"), text]
        said = _run(launch, environment)
        found = [Path(folder, f"{r}.json") for r in range(ranks)]
        if not all(file.exists() for file in found):
            sys.exit(f"{said}\nthe ranks ended without a result: {' '.join(launch[:4])} ...")
        each = [json.loads(file.read_text()) for file in found]
    return [(*rows[0][:3], list(map(max, *(us for *_, us in rows)))) for rows in zip(*each, strict=True)]


def _run(command: Sequence[str], environment: dict[str, str], limit: float = 900) -> str:
    """Run to the end, ranks and all; returns what was said."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=limit)[0][-4000:]
        except subprocess.TimeoutExpired:
            return f"not done within {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def rank(job: dict[str, Any]) -> None:
    """One rank of a session: check every way once, time them in turn, write the times."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
    torch.set_num_threads(1)
    flow.init(timeout=120)
    me, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    times = []
    for side, calls in job["sizes"]:
        table = {move: ways(move, side, me, ranks) for move in job["moves"]}
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for k in range(-job["warm"], job["rounds"]):
            for move, row in table.items():
                turn = list(row.items())
                for way, call in turn[k % len(turn) :] + turn[: k % len(turn)]:  # nobody is always first
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(calls):
                        call()
                    if k >= 0:
                        found[move, way].append((time.perf_counter() - start) / calls * 1e6)
        times += [(side, move, way, us) for (move, way), us in found.items()]
    Path(job["folder"], f"{me}.json").write_text(json.dumps(times))
    flow.boxing.close()


def ways(move: str, side: int, me: int, ranks: int) -> dict[str, Way]:
    """The ways that are timed for a move on this rank, each checked for its values first."""
    a, b = move.split("->")
    p = flow.placement("cpu", list(range(ranks)))
    whole = torch.arange(side * side, dtype=torch.float32).reshape(side, side) % 251  # sums of these are exact
    src, dst = flow.layout(p, SBP[a], whole.shape), flow.layout(p, SBP[b], whole.shape)
    shards = flow.boxing.scatter(whole, src)
    if a == "P":
        shards, whole = (whole * (me + 1),), whole * (ranks * (ranks + 1) // 2)
    out = flow.box(shards, src, dst)
    assert torch.equal(flow.boxing.gather(out, dst), whole), move

    table: dict[str, Way] = {"box": lambda: flow.box(shards, src, dst)}
    route, group = flow.boxing.between(src, dst).route, dist.group.WORLD
    assert group is not None
    table["hand"] = hand = by_hand(move, route, shards[0], me, ranks, group)
    assert torch.equal(hand(), out[0]), f"{move} by hand"
    if side == min(SIZES):
        idle = Idle()
        table["idle box"] = lambda: idle.during(table["box"])
        table["idle hand"] = by_hand(move, route, shards[0], me, ranks, idle)
    raw = collective(move, side, ranks)
    if raw is not None:
        table["raw"] = raw
    if b != "P":  # DTensor refuses to make a tensor partial
        mesh = init_device_mesh("cpu", (ranks,))
        tensor, target = DTensor.from_local(shards[0], mesh, [DTENSOR[a]]), [DTENSOR[b]]
        table["dtensor"] = lambda: tensor.redistribute(mesh, target)
        assert torch.equal(tensor.redistribute(mesh, target).to_local(), out[0]), f"{move} by DTensor"
    return table


def collective(move: str, side: int, ranks: int) -> Way | None:
    """The collective of the same bytes. Zeros, since all_reduce works in place again and again."""
    whole, piece = torch.zeros(side, side), torch.zeros(side // ranks, side)
    other = torch.zeros_like(piece)
    return {
        "S0->B": lambda: dist.all_gather_into_tensor(whole, piece),
        "S1->B": lambda: dist.all_gather_into_tensor(whole, piece),
        "P->B": lambda: dist.all_reduce(whole),
        "P->S0": lambda: dist.reduce_scatter_tensor(piece, whole),
        "S0->S1": lambda: dist.all_to_all_single(other, piece),
    }.get(move)


class Idle:
    """A wire on which everything has arrived at once, though nothing is sent."""

    def __init__(self) -> None:
        transport = execute.transport()
        assert isinstance(transport, Dist)
        self.transport, self.group = transport, transport.pg

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Idle":
        return self

    recv = send

    def wait(self, limit: timedelta | None = None) -> None:
        pass

    def during(self, call: Way) -> None:
        """Call with this wire in place of flow.box's."""
        self.transport.pg = cast(dist.ProcessGroup, self)
        call()
        self.transport.pg = self.group


def by_hand(move: str, route: str, x: Tensor, me: int, ranks: int, wire: dist.ProcessGroup | Idle) -> Way:
    """The route of the plan for even pieces, with new memory for what is new, as flow.box must have it too."""
    peers = [r for r in range(ranks) if r != me]

    def exchange(into: Callable[[int], Tensor], outof: Callable[[int], Tensor]) -> list[Any]:
        works = [wire.recv([into(r)], r, TAG) for r in peers]
        return works + [wire.send([outof(r)], r, TAG) for r in peers]

    def wait(works: Iterable[Any]) -> None:
        for work in works:
            work.wait()

    def gather_rows(x: Tensor) -> Tensor:
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        parts = out.chunk(ranks)
        works = exchange(parts.__getitem__, lambda r: x)
        parts[me].copy_(x)
        wait(works)
        return out

    def gather_columns(x: Tensor) -> Tensor:
        out, data = x.new_empty(x.shape[0], ranks * x.shape[1]), [torch.empty_like(x) for _ in range(ranks)]
        works = exchange(data.__getitem__, lambda r: x)
        parts = out.chunk(ranks, 1)
        parts[me].copy_(x)
        wait(works)
        for r in peers:
            parts[r].copy_(data[r])
        return out

    def rows_to_columns(x: Tensor) -> Tensor:
        out = x.new_empty(ranks * x.shape[0], x.shape[1] // ranks)
        into, outof = out.chunk(ranks), x.chunk(ranks, 1)
        works = exchange(into.__getitem__, lambda r: outof[r].contiguous())
        into[me].copy_(outof[me])
        wait(works)
        return out

    def add(x: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        data = [x.new_empty(pieces[me].shape) for _ in range(ranks)]
        wait(exchange(data.__getitem__, pieces.__getitem__))
        data[me] = pieces[me]
        out = data[0] + data[1]
        for term in data[2:]:
            torch.add(out, term, out=out)
        return out

    def partial(x: Tensor) -> Tensor:
        if move == "B->P":
            return x if me == 0 else torch.zeros_like(x)
        out = x.new_zeros(ranks * x.shape[0], x.shape[1])
        out.chunk(ranks)[me].copy_(x)
        return out

    found: dict[str, Way] = {
        "all_gather": lambda: gather_rows(x) if move == "S0->B" else gather_columns(x),
        "all_to_all": lambda: rows_to_columns(x),
        "reduce_scatter": lambda: add(x, x.chunk(ranks)),
        "all_reduce_once": lambda: add(x, [x] * ranks),
        "all_reduce": lambda: gather_rows(add(x, x.view(-1).chunk(ranks))).view(x.shape),
        "slice": lambda: x.narrow(0, me * (x.shape[0] // ranks), x.shape[0] // ranks),
        "to_partial": lambda: partial(x),
    }
    return found[route]


def tables(times: Times) -> str:
    """Markdown: a table for each number of ranks and size, then which aims were met."""
    out = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}. "
        "Microseconds, median/min of all rounds; box - raw, own and the first ratio are medians of what single rounds "
        "give, and a ratio below 1 means that flow.box is faster.",
    ]
    for n, side in sorted({(n, side) for n, side, _ in times}):
        label = f"{n} ranks, {SIZES[side][0]}"
        table = [["move", "box", "raw", "box - raw", "by hand", "own", "DTensor", "ratio", "OneFlow", "ratio"]]
        for move in (m for m in MOVES if (n, side, m) in times):
            cell = times[n, side, move]
            theirs = (part for way in ("dtensor", "oneflow") for part in (shown(cell, way), over(cell, way)))
            row = [move, shown(cell, "box"), shown(cell, "raw"), more(cell, "raw"), shown(cell, "hand")]
            table.append([*row, own_work(cell), *theirs])
        out += ["", f"**{label}**", "", *aligned(table)]
    return "\n".join([*out, "", "Aims (issue 2), cells that meet each and those that do not:", "", *aims(times)])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows as Markdown that is readable as it stands; columns without entries are left out."""
    columns = [c for c in zip(*table, strict=True) if any(c[1:])]
    widths = [max(map(len, column)) for column in columns]
    rows = [[entry.rjust(w) for entry in column] for column, w in zip(columns, widths, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in zip(*rows, strict=True)]
    return [lines[0], "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|", *lines[1:]]


Runs: TypeAlias = dict[str, list[list[float]]]


def pooled(cell: Runs, way: str) -> list[float]:
    return [us for session in cell.get(way, []) for us in session]


def shown(cell: Runs, way: str) -> str:
    us = pooled(cell, way)
    return f"{statistics.median(us):.0f}/{min(us):.0f}" if us else ""


def excess(cell: Runs, way: str) -> tuple[float, float] | None:
    """How much longer flow.box took than another way in the same round, the median: in us, and in % of that way."""
    if way not in cell:
        return None
    theirs = pooled(cell, way)
    us = statistics.median(a - b for a, b in zip(pooled(cell, "box"), theirs, strict=True))
    return us, 100 * us / statistics.median(theirs)


def more(cell: Runs, way: str) -> str:
    found = excess(cell, way)
    return f"{found[0]:+.0f} ({found[1]:+.0f} %)" if found else ""


def own_work(cell: Runs) -> str:
    both = list(zip(pooled(cell, "idle box"), pooled(cell, "idle hand"), strict=True))
    return f"{statistics.median(box - hand for box, hand in both):.0f}" if both else ""


def ratio(cell: Runs, way: str) -> float | None:
    """The time of flow.box over that of another way: median of rounds, or for other processes the best session's."""
    if way not in cell:
        return None
    if way == "oneflow":
        ours, theirs = (min(map(statistics.median, cell[w])) for w in ("box", way))
        return ours / theirs
    return statistics.median(a / b for a, b in zip(pooled(cell, "box"), pooled(cell, way), strict=True))


def over(cell: Runs, way: str) -> str:
    found = ratio(cell, way)
    return f"{found:.2f}" if found is not None else ""


def aims(times: Times) -> list[str]:
    def tell(name: str, judged: Iterable[tuple[Cell, float | None, float]]) -> str:
        cells = [(cell, value, limit) for cell, value, limit in judged if value is not None]
        bad = [f"{m} {SIZES[side][0]} on {n} ({value:.3g})" for (n, side, m), value, limit in cells if value > limit]
        return f"- {name}: {len(cells) - len(bad)} of {len(cells)}" + (f"; not {', '.join(bad)}" if bad else "")

    raw = {cell: excess(ways, "raw") or (None, None) for cell, ways in times.items()}
    lines = [
        tell("at most 25 us over the raw collective", ((c, us, 25.0) for c, (us, _) in raw.items())),
        tell("at most 5 % over the raw collective", ((c, part, 5.0) for c, (_, part) in raw.items())),
        tell(
            "at most half of DTensor's time at 4 KiB, never above it",
            ((c, ratio(ways, "dtensor"), 0.5 if c[1] == 32 else 1.0) for c, ways in times.items()),
        ),
        tell(
            "at or below OneFlow at 4 KiB and 1 MiB",
            ((c, ratio(ways, "oneflow"), 1.0) for c, ways in times.items() if c[1] < 2048),
        ),
    ]
    return [line for line in lines if " 0 of 0" not in line]


def write(report: str) -> None:
    """Put the report between its markers in the docs."""
    begin, end = "<!-- boxing:begin -->", "<!-- boxing:end -->"
    head, _, rest = DOCS.read_text(encoding="utf-8").partition(begin)
    DOCS.write_text(f"{head}{begin}\n{report}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
