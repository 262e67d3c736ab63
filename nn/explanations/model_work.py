"""The work of a step: FLOPs of its forward and backward, by dtype, and the seconds that they take at the devices' peak.

Work is that of the model for a whole batch on all ranks together, of causal attention the half that is computed; what
runs again because memory lacks does not count.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from ...placement.hardware import Device
from ...sbp.joint.op_cost import dtype_of
from ...sbp.kernels.kernels import kernels_of
from ...sbp.logical import Logical
from ..graph.plan import Planned

__all__ = ["Work", "model_work", "peak_seconds"]

Work = Mapping[torch.dtype, float]


def model_work(plan: Planned) -> Work:
    """FLOPs of a step by the dtype in which they are computed."""
    found = defaultdict[torch.dtype, float](float)
    for logical, times in _graphs(plan):
        for dtype, many in _flops(logical).items():
            found[dtype] += many * times
    return dict(found)


def peak_seconds(work: Work, device: Device) -> float:
    """The seconds of one device that reaches its peak; an unknown dtype counts as float32."""
    peaks = device.flops
    return sum(
        many / (peaks.get(str(dtype).removeprefix("torch.")) or peaks["float32"]) for dtype, many in work.items()
    )


def _graphs(plan: Planned) -> Iterator[tuple[Logical, int]]:
    """The graphs that a step runs, and how often: those of its micro-batches, and the end on the whole batch."""
    pieces = plan.pieces
    if pieces is None:
        yield plan.logical, 1
        return
    routes = 1 + max(route for route, _ in pieces.sized)
    for key, times in Counter((k % routes, kind) for k, kind in enumerate(pieces.kinds)).items():
        yield pieces.sized[key].micro.logical, times
    if pieces.late is not None:
        yield pieces.late.whole.logical, 1


def _flops(logical: Logical) -> Work:
    found = defaultdict[torch.dtype, float](float)
    wanted = logical.wants_grad if logical.losses else frozenset[int]()  # without a loss there is no backward
    for op in logical.ops:
        call, trained = logical.call(op), not wanted.isdisjoint(op.numbers)
        kernels = kernels_of(call, [trained and n in wanted for n in op.inputs])
        found[dtype_of(call)] += kernels.forward.flops + kernels.backward.flops
    return {dtype: many for dtype, many in found.items() if many}
