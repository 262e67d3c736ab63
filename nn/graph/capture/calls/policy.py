"""The policy of a region that is recomputed: which of its ops are kept, as `create_selective_checkpoint_contexts` says.

A policy is asked about the calls below autograd that an op of the graph is made of (`aten.addmm` of a linear); where
one of them is to be saved, the op is no part of the region.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, noop_context_fn

from .....boxing.record import user_line
from .....placement.errors import SbpError
from ....model.recompute.kept_ops import KeptOps
from ....model.recompute.replay import name_of

__all__ = ["Asking", "Policy", "naming", "policy_of"]

Policy: TypeAlias = Callable[..., Any]

KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


def policy_of(context_fn: Callable[[], Any]) -> Policy | None:
    """The policy that the `context_fn=` of `torch.utils.checkpoint` has for each op; None if it recomputes all."""
    if context_fn is noop_context_fn:
        return None
    policy: Policy | None = getattr(context_fn()[0], "policy_fn", None)
    if policy is None:
        raise SbpError(
            f"capture: checkpoint(context_fn=...) at {user_line()} gives contexts that a graph does not run\n"
            "  make them by torch.utils.checkpoint.create_selective_checkpoint_contexts, or leave context_fn= out"
        )
    return policy


def naming(kept: KeptOps) -> Policy:
    """The policy of one region that keeps the results of these ops."""
    counted = kept.counted()
    return lambda context, func, *args, **kwargs: counted(name_of(func))


class Asking(TorchDispatchMode):
    """Asks a policy about all calls below autograd; `saves` once it wants the result of one kept."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.saves = policy, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = out  # which torch before 2.13 neither takes nor tells
        self.saves = self.policy(context, func, *args, **kwargs) in KEPT or self.saves
        return out
