"""Checkpoints of a model with AdamW: saved, loaded, and saved beside the steps, next to torch's own ways.

    python -m benchmarks.checkpoint [--gib 1.0] [--folder PATH] [--quick] [--write]

sbpflow       flow.save and flow.load of a model whose weights and states are split over two processes
dcp           torch.distributed.checkpoint of the same model under FSDP2
torch.save    one process that has all of it

Every way writes as many numbers, and waits until they are on the disk; what is loaded is compared with what was saved.
"""

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import judged, ratio
from sbpflow.nn.files.raw import traffic
from sbpflow.placement.network.this_host import memory_folder

RANKS, ROUNDS, WIDTH = 2, 3, 2048
WHAT = ["save", "load", "save beside"]
STALL = 0.2  # of DCP's, that a save beside the steps may hold them up
dcp: Any = import_module("torch.distributed.checkpoint")
states: Any = import_module("torch.distributed.checkpoint.state_dict")
Ways = dict[str, Callable[[Path], Any]]  # of a save beside the steps what waits for its end


def model_of(gib: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers = max(1, round(gib * 2**30 / (4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with its states: gradients of a millionth, and one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for x in model.parameters():
        x.grad = torch.full_like(x, 1e-6)
        optimizer.step()
        x.grad = None
    return optimizer


def total(model: nn.Module) -> float:
    values: list[Any] = list(model.parameters())
    return sum((float((x.full_tensor() if hasattr(x, "full_tensor") else x).double().sum()) for x in values), 0.0)


def ours(gib: float) -> tuple[Ways, Callable[[], float]]:
    where = flow.placement("cpu", range(RANKS))
    model = flow.nn.to_global(model_of(gib), where, {"*": flow.S(0)})
    optimizer = stepped(model)
    ways: Ways = {
        "save": lambda path: flow.save(path, model, optimizer=optimizer),
        "load": lambda path: flow.load(path, model, optimizer=optimizer),
        "save beside": lambda path: flow.save(path, model, optimizer=optimizer, asynchronous=True).wait,
    }
    return ways, lambda: total(model)


def theirs(gib: float) -> tuple[Ways, Callable[[], float]]:
    model = model_of(gib)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = stepped(model)

    def state() -> dict[str, Any]:
        held, kept = states.get_state_dict(model, optimizer)
        return {"model": held, "optimizer": kept}

    def load(path: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        states.set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )  # fmt: skip

    ways: Ways = {
        "save": lambda path: dcp.save(state(), checkpoint_id=path),
        "load": load,
        "save beside": lambda path: dcp.async_save(state(), checkpoint_id=path).result,
    }
    return ways, lambda: total(model)


def alone(gib: float) -> tuple[Ways, Callable[[], float]]:
    model = model_of(gib) if dist.get_rank() == 0 else nn.Sequential()
    optimizer = stepped(model) if dist.get_rank() == 0 else None

    def save(path: Path) -> None:
        if optimizer is not None:
            path.mkdir(exist_ok=True)
            with open(path / "all.pt", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

    def load(path: Path) -> None:
        if optimizer is not None:
            found = torch.load(path / "all.pt", weights_only=True)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])

    return {"save": save, "load": load}, lambda: total(model)


def measured(way: str, gib: float, rounds: int, folder: Path) -> Times:
    flow.init(timeout=600)
    dist.barrier()
    calls, told = {"sbpflow": ours, "dcp": theirs, "torch.save": alone}[way](gib)
    times: dict[str, list[float]] = defaultdict(list)
    before = told()
    for number in range(rounds + 1):
        for what, call in calls.items():
            path = folder / ("saved" if what != "save beside" else "beside")
            if what != "load" and dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            dist.barrier()
            start = time.perf_counter()
            with traffic() as moved:
                rest = call(path)
                spent = time.perf_counter() - start
                if what == "save beside":
                    rest()
            dist.barrier()
            if number:  # the first fills caches
                times[what].append(spent * 1e6)
                times[f"{what}, bytes"].append(float(moved.read if what == "load" else moved.written))
    assert told() == before, "what was loaded is not what was saved"
    return {way: dict(times)}


def shown(times: Times, gib: float) -> Iterator[str]:
    size = 3 * gib * 2**30
    yield (
        f"**Checkpoints** of {gib:g} GiB of parameters with AdamW's two states, float32, two processes, one thread "
        "each; medians of the slower process. `save beside` is for how long a step is held up."
    )
    yield ""

    def said(way: str, what: str) -> str:
        if what not in times[way]:
            return ""
        seconds = statistics.median(times[way][what]) / 1e6
        return f"{seconds:.2f} s" if what == "save beside" else f"{size / 1e9 / seconds:.2f} GB/s"

    yield from aligned([["", *times], *([what, *(said(way, what) for way in times)] for what in WHAT)])
    yield ""
    pairs = [(what, "dcp", STALL if what == "save beside" else 1.0) for what in WHAT]
    pairs += [(what, "torch.save", 1.0) for what in WHAT[:2]]
    rows = [
        [what, other, *judged(ratio(times["sbpflow"][what], times[other][what]), aim)] for what, other, aim in pairs
    ]
    yield from aligned([["", "beside", "ratio of times", "aim", "met"], *rows])
    yield ""
    each = {what: times["sbpflow"][f"{what}, bytes"][0] / (size / RANKS) for what in WHAT}
    told = ", ".join(f"{what} {share:.5f}" for what, share in each.items())
    yield f"Bytes that the process which moves most wrote and read, of its half of the numbers: {told}."


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of parameters; a checkpoint is three times that")
    parser.add_argument("--folder", default=memory_folder(), help="of the disk that is to be measured; else in memory")
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: measured(job["way"], job["gib"], job["rounds"], Path(job["place"])))
        return
    times: Times = {}
    with tempfile.TemporaryDirectory(prefix="sbpflow-bench-", dir=options.folder) as place:
        for way in ("sbpflow", "dcp", "torch.save"):
            job = {"way": way, "gib": options.gib, "rounds": 1 if options.quick else ROUNDS, "place": place}
            times |= launched("checkpoint", RANKS, job)
            shutil.rmtree(Path(place, "saved"), ignore_errors=True)
            shutil.rmtree(Path(place, "beside"), ignore_errors=True)
    head = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}."
    reported("checkpoint", [head, "", *shown(times, options.gib)], write=options.write)


if __name__ == "__main__":
    main()
