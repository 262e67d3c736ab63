"""Words for ops that a recomputed module keeps the results of, and the kernels below autograd that they stand for."""

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch

from ....placement.errors import SbpError

__all__ = ["FUSED", "PRODUCTS", "SOFTMAX", "kernels_of"]

PRODUCTS = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
     "_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"]
)  # fmt: skip
FUSED = frozenset(
    f"_scaled_dot_product_{name}"
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                 "fused_attention_overrideable")
)  # fmt: skip
SOFTMAX = frozenset(("_softmax", "_safe_softmax"))

# Words, and ops that torch makes of others before autograd sees them.
WORDS: dict[str, frozenset[str]] = {
    "mm": PRODUCTS,
    "attention": FUSED | SOFTMAX,
    **dict.fromkeys(("linear", "matmul", "einsum", "tensordot"), PRODUCTS),
    "scaled_dot_product_attention": FUSED,
    "softmax": SOFTMAX,
    "log_softmax": frozenset(("_log_softmax",)),
    "layer_norm": frozenset(("native_layer_norm",)),
    "group_norm": frozenset(("native_group_norm",)),
    "rms_norm": frozenset(("_fused_rms_norm",)),
    "batch_norm": frozenset(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), frozenset(("convolution",))),
}  # fmt: skip


def kernels_of(words: Iterable[str]) -> frozenset[str]:
    """The kernels that words stand for, named as torch does, without `aten::`."""
    return frozenset[str]().union(*map(_kernels, words))


@cache
def _kernels(word: str) -> frozenset[str]:
    if word in WORDS:
        return WORDS[word]
    space, _, name = word.rpartition("::")
    packet: Any = getattr(getattr(torch.ops, space or "aten"), name, None) if name else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        known = [
            *WORDS,
            *(full.partition(".")[0].removeprefix("aten::") for full in torch._C._dispatch_get_all_op_names()),
        ]
        near = get_close_matches(word, dict.fromkeys(known), 3)
        meant = (
            f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(WORDS)}, and all ops"
        )
        raise SbpError(f"recompute: there is no op called {word!r}\n  {meant}")
    each: Any = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    if all(op._can_decompose() for op in each):
        raise SbpError(
            f"recompute: {word!r} is made of other ops, and none of its own is ever kept\n"
            "  name these, or one of " + ", ".join(WORDS)
        )
    return frozenset((word.removeprefix("aten::"),))
