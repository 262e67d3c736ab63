"""Words for ops that a recomputed module keeps the results of, and the kernels below autograd that they stand for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ....placement.errors import SbpError, did_you_mean

__all__ = ["EVERY_SECOND", "FUSED", "PRODUCTS", "SOFTMAX", "KeptOps", "kept_ops"]

EVERY_SECOND = "every second "

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

ALL_PRODUCTS = PRODUCTS | {"sbpflow::product_of_8_bits"}

# Words, and ops that torch makes of others before autograd sees them.
WORDS: dict[str, frozenset[str]] = {
    "mm": ALL_PRODUCTS,
    "attention": FUSED | SOFTMAX,
    **dict.fromkeys(("linear", "matmul", "einsum", "tensordot"), ALL_PRODUCTS),
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


@dataclass(frozen=True)
class KeptOps:
    """The kernels whose results are kept, named as torch does, without `aten::`. Of each set in `halved` the first in a
    module is kept, the second is not, and so on in turns."""

    kernels: frozenset[str]
    halved: tuple[frozenset[str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.kernels or self.halved)

    def counted(self) -> Callable[[str], bool]:
        """Whether the result of a kernel is kept, asked once for each call of a run, in order."""
        met = [0] * len(self.halved)

        def keeps(name: str) -> bool:
            kept = name in self.kernels
            for at, kernels in enumerate(self.halved):
                if name in kernels:
                    met[at] += 1
                    kept = kept or met[at] % 2 == 1
            return kept

        return keeps


def kept_ops(words: Iterable[str]) -> KeptOps:
    """The ops that words name, such as `attention`, or `every second mm`."""
    listed = list(words)
    second = [word.removeprefix(EVERY_SECOND) for word in listed if word.startswith(EVERY_SECOND)]
    whole = frozenset[str]().union(*(_kernels(word) for word in listed if not word.startswith(EVERY_SECOND)))
    return KeptOps(whole, tuple(_kernels(word.strip()) for word in second))


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
        meant = did_you_mean(word, known, f"there are {', '.join(WORDS)}, and all ops")
        raise SbpError(f"recompute: there is no op called {word!r}\n  {meant}")
    each: Any = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    if all(op._can_decompose() for op in each):
        raise SbpError(
            f"recompute: {word!r} is made of other ops, and none of its own is ever kept\n"
            "  name these, or one of " + ", ".join(WORDS)
        )
    return frozenset((word.removeprefix("aten::"),))
