"""The error of an op that needs more than one micro-batch at once: what it is asked to do, and what may be done."""

from collections.abc import Sequence

from ....placement.errors import SbpError
from ....sbp.call import Call
from ....sbp.joint.options import answer_of
from ....sbp.logical import LogicalOp
from ....sbp.state import State

__all__ = ["WAITING", "NeedsAll", "needs_all", "said"]


class NeedsAll(SbpError):
    """An op needs more than one micro-batch at once."""


def said(state: State, axes: int) -> str:
    """A state as a user would write it.

    >>> said(State(((0,), ())), 1), said(State(((0,), (1,))), 2)
    ('S(0)', '(S(0), S(1))')
    """
    words = list(map(str, state.sbp(axes)))
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


WAITING = (
    "\n  or take the schedule gpipe: all micro-batches go forward before one goes back, and the end of a step is "
    "computed in between"
)
ONE_BY_ONE = "  it takes samples one by one: have each part in one micro-batch, or write it on all of them at once\n"
PRODUCT = (
    "  these are sums over all samples, which are known when the last micro-batch has gone forward; the first may have "
    "gone back by then. A loss that balances experts so is left out by output_router_logits=False in transformers\n"
)
HINTS = {
    "sbpflow::recurrent": "  a batch is cut along its first dim: give the layer samples there, and batch_first=True\n",
    "embedding_bag": "  words are in a line, and bags begin anywhere: give rows of words, filled up with padding_idx\n",
    "masked_scatter": "  its mask has to be made of arguments alone, and what it takes of layers that see samples\n",
    **dict.fromkeys(("unbind", "split", "split_with_sizes", "chunk"), ONE_BY_ONE),
}


def needs_all(op: LogicalOp, call: Call, causes: Sequence[LogicalOp]) -> NeedsAll:
    """The error of an op whose inputs lie so along time; `causes` are the ops that first added up over these."""
    lies = ", ".join(said(state, len(call.sizes)) for state in call.states)
    slices = len(call.sizes) > 1
    what, told = "slice or micro-batch" if slices else "micro-batch", ""
    for cause in causes:
        told += f"  {cause.name} at {cause.origin.line or 'no line'} adds up over these\n"
    asked = f"{call.name} at {op.origin.line or 'no line'} needs more than one {what} at once"
    told = f"  it is in {op.origin.module or 'no module'}, and along time its inputs are {lies}\n{told}"
    if answer_of(call) is None:
        return NeedsAll(
            f"{asked}, for all that is known: no rule tells what it does to each sample\n{told}"
            "  leave micro_batches= out, write it by ops that have one, or give it one by flow.rule"
        )
    if slices:
        return NeedsAll(
            f"{asked}\n{told}"
            "  tokens may see earlier ones in F.scaled_dot_product_attention, with is_causal=True or such a mask, "
            "without dropout, and nowhere else; or leave slices= out"
        )
    hint = HINTS.get(call.name.partition(".")[0], "")
    if call.name in ("mul.Tensor", "div.Tensor") and all(state.partial for state in call.states):
        hint = PRODUCT
    return NeedsAll(
        f"{asked}\n{told}{hint}"
        "  leave micro_batches= out, have batch norm in eval(), or write it so that samples do not depend on each "
        "other and the loss is a sum or a mean over them"
    )
