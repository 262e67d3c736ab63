"""Training steps by plans beside the peers whose technique each plan says, on two and on four Gloo ranks.

    python -m benchmarks.plans [--quick] [--only zero1 ...] [--ranks 2 4] [--write]

data    a plan that says nothing but the grid, beside DDP
zero1   states cut, beside DDP with ZeroRedundancyOptimizer
zero3   weights cut, beside FSDP2 (fully_shard)
tensor  Megatron's cuts, beside parallelize_module

All ways of a case go in turn, round by round, in the same processes, after their losses were found equal.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator
from itertools import cycle, product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned, timed
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.graph_models import Batch, Size, Step, adamw, agree, batch, loss_of, made, trainer
from benchmarks.parts.graph_peers import dtensor, replicated, sharded, told
from benchmarks.parts.processes import launched, worker
from benchmarks.parts.tables import judged, ms, ratio

ROUNDS = 21
SIZES = {
    "small": (Size(layers=4, width=64, heads=4, batch=8, length=32), 4),  # and calls a round
    "large": (Size(layers=4, width=256, heads=8, batch=8, length=64), 1),
}
CUT = "grid (data=*)\ninput * <- data=S(0)\n"
PLANS = {
    "data": f"{CUT}**: data=B",
    "zero1": f"{CUT}states **: data=S(0)",
    "zero3": f"{CUT}**: data=S(0)",
    "tensor": "grid (tensor=*)\nblocks.*.{q,k,v,up}: tensor=S(0)\nblocks.*.{out,down}: tensor=S(1)",
}
PEERS = {"data": "DDP", "zero1": "DDP, ZeroRedundancyOptimizer", "zero3": "FSDP2", "tensor": "parallelize_module"}
AIM = 1.0


def measured(name: str, size: str, rounds: int) -> Times:
    flow.init(timeout=120)
    model_size, calls = SIZES[size]
    ways = {PEERS[name]: peer(name, model_size), "sbpflow": ours(name, model_size)}
    whole = "tensor" if name == "tensor" else "DDP"  # theirs is else the loss of the rank's own part of the batch
    agree({way: told(step, way if way == "sbpflow" else whole) for way, step in ways.items()}, PEERS[name], name)
    return timed({f"{name}, {size}, {dist.get_world_size()}": dict(ways)}, rounds, calls, meet=True)


def ours(name: str, size: Size) -> Step:
    model = made(size)
    optimizer = adamw(model.parameters(), fused=True)
    step: Callable[..., torch.Tensor] = flow.compile(model, loss_of, optimizer, plan=PLANS[name])
    where = flow.placement("cpu", range(dist.get_world_size()))
    given = [flow.tensor(x, placement=where, sbp=flow.B if name == "tensor" else flow.S(0)) for x in batch(size)]
    return lambda: step(*given)


def peer(name: str, size: Size) -> Step:
    me, ranks = dist.get_rank(), dist.get_world_size()
    whole = batch(size)
    mine: Batch = tuple(x.chunk(ranks)[me].clone() for x in whole)
    mesh = init_device_mesh("cpu", (ranks,))
    match name:
        case "data":
            return replicated(size, mine)
        case "zero1":
            model = DistributedDataParallel(made(size), gradient_as_bucket_view=True)
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
            )
            return trainer(model, optimizer, mine)
        case "zero3":
            return sharded(size, mine, mesh)
        case _:
            return dtensor(size, whole, mesh)


def shown(times: Times) -> Iterator[str]:
    sizes = "; ".join(f"{name}: {size}" for name, (size, _) in SIZES.items())
    yield (
        "**A training step by a plan**, forward, backward and AdamW (fused), milliseconds, medians of the slowest "
        f"rank. {sizes}; the batch is that of all ranks together. The ratio is the median of those of single rounds."
    )
    yield ""
    rows = [["plan", "size", "ranks", "sbpflow", "beside", "its time", "ratio", "aim", "met"]]
    for what, ways in times.items():
        name, size, ranks = what.split(", ")
        other = PEERS[name]
        row = judged(ratio(ways["sbpflow"], ways[other]), AIM)
        rows.append([name, size, ranks, ms(ways["sbpflow"]), other, ms(ways[other]), *row])
    yield from aligned(rows)


def main() -> None:
    parser = command_line(__doc__, PLANS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: measured(job["name"], job["size"], job["rounds"]))
        return
    times: Times = {}
    each_once = zip(options.only, cycle(options.ranks), cycle(SIZES), strict=False)
    for name, ranks, size in each_once if options.quick else product(options.only, options.ranks, SIZES):
        job = {"name": name, "size": size, "rounds": 3 if options.quick else ROUNDS}
        times |= launched("plans", ranks, job)
    head = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a rank."
    reported("plans", [head, "", *shown(times)], write=options.write)


if __name__ == "__main__":
    main()
