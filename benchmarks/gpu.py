"""Timings that only a card can give, a part a process: `tools/gpu.py` runs them all, each under its own limit.

    python -m benchmarks.gpu eager [--device cpu] [--quick]

Each prints one line of JSON, {what is timed: {way: [microseconds of each round]}}. All ways go in turn, round by round,
and a card is waited for at the end of every call. Of a way that fails the error is told; the others go on.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from benchmarks.parts.alone import timed
from sbpflow import B, P, S

ROOT = Path(__file__).resolve().parent.parent
Call: TypeAlias = Callable[[], object]
Found: TypeAlias = dict[str, dict[str, list[float] | str]]
OPS = 50  # in one call of what is timed by the op
SHARE = """
import os, sys
os.environ.setdefault("NCCL_HOSTID", "host" + os.environ["RANK"])  # NCCL refuses two ranks on one card of one host
sys.argv = ["benchmarks.gpu", *sys.argv[1:]]
from benchmarks.gpu import main
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="few rounds of little: whether all runs")
    options = parser.parse_args()
    found = PARTS[options.part](options.device, options.quick)
    if found and os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)
    flow.boxing.close()


def measured(device: str, quick: bool, table: dict[str, dict[str, Call]], per_call: int = 1) -> Found:
    """The times of all ways that run at all; of the others the error."""
    failed: Found = {}

    def waited(call: Call) -> Call:
        def run() -> None:
            call()
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    for what, ways in table.items():
        for way, call in list(ways.items()):
            try:
                for _ in range(1 if quick else 3):
                    waited(call)()
            except Exception as error:
                failed.setdefault(what, {})[way] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                del ways[way]
    ready = {what: {way: waited(call) for way, call in ways.items()} for what, ways in table.items()}
    times = timed(ready, rounds=2 if quick else 20, calls=1)
    return {
        what: {**{way: [us / per_call for us in each] for way, each in times[what].items()}, **failed.get(what, {})}
        for what in table
    }


def repeated(op: Call) -> Call:
    def run() -> None:
        for _ in range(OPS):
            op()

    return run


def eager(device: str, quick: bool) -> Found:
    """One op on a global tensor beside the same op on a plain one."""
    p = flow.placement(device, [0])
    x, w = (torch.randn(256, 256, device=device) for _ in range(2))
    g, v = (flow.tensor(each, placement=p, sbp=S(0)) for each in (x, w))
    table: dict[str, dict[str, Call]] = {
        "add": {"torch": repeated(lambda: x + w), "sbpflow": repeated(lambda: g + v)},
        "linear": {"torch": repeated(lambda: F.linear(x, w)), "sbpflow": repeated(lambda: F.linear(g, v))},
    }
    return measured(device, quick, table, OPS)


def net(width: int, layers: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))).to(device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def plain_step(model: Any, x: Tensor, y: Tensor) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def graph(device: str, quick: bool) -> Found:
    """A training step as a graph, recorded for the card too, beside eager torch, `torch.compile` and CUDA graphs."""
    width, layers = (32, 2) if quick else (1024, 12)
    x, y = (torch.randn(64, width, device=device) for _ in range(2))

    def compiled(**options: Any) -> Any:
        mine = net(width, layers, device)
        flow.nn.to_global(mine, flow.placement(device, [0]), B)
        return flow.compile(mine, loss_of, torch.optim.SGD(mine.parameters(), lr=1e-3), **options)

    step = compiled()
    backend = "inductor" if device == "cuda" else "eager"  # on a CPU this is tried, not timed
    ways: dict[str, Call] = {
        "eager torch": plain_step(net(width, layers, device), x, y),
        "sbpflow": lambda: step(x, y),
        "torch.compile": plain_step(torch.compile(net(width, layers, device), backend=backend), x, y),
    }
    if device == "cuda":
        recorded = compiled(cuda_graph=True)
        ways["sbpflow, cuda_graph=True"] = lambda: recorded(x, y)
        ways["CUDA graphs"] = plain_step(torch.compile(net(width, layers, device), mode="reduce-overhead"), x, y)
    return measured(device, quick, {f"step of {layers} layers of {width}": ways})


def boxing(device: str, quick: bool) -> Found:
    """Moves between two processes, which share the card, beside the raw collective. Starts itself on two ranks."""
    if "RANK" not in os.environ:
        more = ["--quick"] * quick
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        command = [*launch, sys.executable, "-c", SHARE, "boxing", "--device", device, *more]
        subprocess.run(command, cwd=ROOT, check=True)
        return {}
    import torch.distributed as dist

    flow.init(timeout=60)
    p = flow.placement(device, [0, 1])
    side = 64 if quick else 1024
    here = torch.ones(side, side, device=device)
    half, whole = here[: side // 2].contiguous(), torch.empty(side, side, device=device)
    moves: dict[str, tuple[flow.sbp.Sbp, flow.sbp.Sbp, Tensor, Call]] = {
        "P -> B": (P, B, here, lambda: dist.all_reduce(here.clone())),
        "S(0) -> B": (S(0), B, half, lambda: dist.all_gather_into_tensor(whole, half)),
        "P -> S(0)": (P, S(0), here, lambda: dist.reduce_scatter_tensor(torch.empty_like(half), here)),
    }
    table: dict[str, dict[str, Call]] = {}
    for name, (src, dst, shard, raw) in moves.items():
        a, b = flow.layout(p, src, (side, side)), flow.layout(p, dst, (side, side))
        table[name] = {"raw": raw, "sbpflow": lambda a=a, b=b, shard=shard: flow.box([shard], a, b)}  # type: ignore[misc]
    return measured(device, quick, table)


def pipeline(device: str, quick: bool) -> Found:
    """Two stages on one card, eight micro-batches, beside the same micro-batches by hand on one."""
    width, layers = (32, 2) if quick else (1024, 12)
    x, y = (torch.randn(256, width, device=device) for _ in range(2))
    model, one = net(width, layers, device), net(width, layers, device)
    flow.nn.pipeline(model, [flow.placement(device, [0]), flow.placement(device, [1])])
    step = flow.compile(model, loss_of, torch.optim.SGD(model.parameters(), lr=1e-3), micro_batches=8)
    optimizer = torch.optim.SGD(one.parameters(), lr=1e-3)

    def by_hand() -> None:
        for part, wanted in zip(x.chunk(8), y.chunk(8), strict=True):
            (loss_of(one, part, wanted) / 8).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return measured(device, quick, {"8 micro-batches": {"by hand": by_hand, "sbpflow": lambda: step(x, y)}})


def examples(device: str, quick: bool) -> Found:
    """Every example on this device: its first loss is the one that it has on the CPU, all at once."""
    names = ["mlp.py"] if quick else sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py"))
    runs = {name: [started(name, where) for where in (device, "cpu")] for name in names}
    found: Found = {}
    for name, (mine, one) in runs.items():
        loss, wanted = first_loss(mine), first_loss(one)
        if isinstance(loss, str) or isinstance(wanted, str):
            found[name] = {"loss": f"failed: {loss if isinstance(loss, str) else wanted}"}
        elif abs(loss - wanted) > 2e-3:
            found[name] = {"loss": f"failed: {loss} where the CPU has {wanted}"}
        else:
            found[name] = {"loss": str(loss)}
    return found


def started(name: str, device: str) -> "subprocess.Popen[str]":
    """An example as it stands, but for the kind of its placements."""
    code = (ROOT / "examples" / name).read_text(encoding="utf-8")
    path = ROOT / "out" / device / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r'placement\("cpu', f'placement("{device}', code), encoding="utf-8")
    for beside in (ROOT / "examples").glob("*.txt"):
        (path.parent / beside.name).write_bytes(beside.read_bytes())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-u", str(path)],
        cwd=path.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def first_loss(run: "subprocess.Popen[str]") -> float | str:
    """The loss that the first step told, after which the run is ended; the last line of one that told nothing."""
    last = "it said nothing"
    assert run.stdout is not None
    with run.stdout:
        for line in run.stdout:
            last = line.strip() or last
            if told := re.search(r"loss +(\d+\.\d+)", line):
                run.kill()
                run.wait()
                return float(told[1])
    run.wait()
    return last


PARTS: dict[str, Callable[[str, bool], Found]] = {
    "examples": examples,
    "eager": eager,
    "graph": graph,
    "boxing": boxing,
    "pipeline": pipeline,
}

if __name__ == "__main__":
    main()
