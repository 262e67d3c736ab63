"""How long it takes to capture and to plan a large model as a whole, which never exists in memory."""

import math
import time

import torch

import sbpflow as flow
from benchmarks.parts.alone import Times
from benchmarks.parts.graph_models import GPT, Size, batch, loss_of

__all__ = ["CASES", "planning"]

CASES = [(layers, grid) for grid in ((8, 8), (16, 16, 16)) for layers in (12, 48, 96)]
CLUSTER = "h100x8"


def planning(rounds: int, layers: int, grid: tuple[int, ...]) -> Times:
    """Seconds, and what the plan is of: ops, nodes of the problem, and how far a better plan can be at most."""
    from sbpflow.nn.graph.capture.trace import trace
    from sbpflow.nn.graph.choose.choose import Choosing, decide, taken_apart
    from sbpflow.sbp.joint.demands import Demands

    size = Size(layers, width=4096, heads=32, batch=math.prod(grid), length=2048, vocabulary=32768)
    with torch.device("meta"):
        model = GPT(size).to(torch.bfloat16)

    def build(*given: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, *given)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    where = flow.placement("cpu", range(math.prod(grid))).reshape(grid)
    with flow.use_cluster(CLUSTER):
        start = time.perf_counter()
        logical = trace(build, batch(size, "meta"), {}, {"model": model}, device="cpu")[0]
        captured = time.perf_counter()
        found = decide(Choosing(*taken_apart(logical, where), Demands(states=2)))
        done = time.perf_counter()
    row = {
        "capture": captured - start,
        "plan": done - captured,
        "solve": found.solution.seconds,
        "ops": len(logical.ops),
        "gap": found.solution.gap,
    }
    return {f"{layers} layers, {' x '.join(map(str, grid))}": {key: [float(value)] for key, value in row.items()}}
