"""Refusals: what is said of options, optimizers and arguments with which a captured step could not do what is asked."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...boxing.graph.physical import Physical
from ...placement.errors import SbpError, SbpflowError, ScheduleError
from ...sbp import Layout
from .optimizer.on_shards import ALONE
from .passes import Passes

__all__ = ["refuse", "refuse_gradients", "refuse_left"]


def refuse(passes: Passes, *, trains: bool) -> None:
    """An error where a captured step, which `trains` if it calls backward, does not hold what is asked of it."""
    name, options, learns = passes.name, passes.options, passes.learns
    validates = trains and options.post_validation
    mixing = next((type(each).__name__ for each in passes.optimizers if type(each) not in ALONE), None)
    flushes = not trains or options.policy.synchronous
    changing = f"schedule {options.policy.name} updates weights while a step goes on, and"
    unknown = "no stage can know whether another overflows"
    laws: tuple[
        tuple[bool, bool, type[SbpflowError], str], ...
    ] = (  # what is asked, what has to hold, and what is said
        (
            learns and torch.is_grad_enabled(),
            trains,
            SbpError,
            f"{name} has an optimizer, and build(...) calls no backward(): nothing would be trained\n"
            "  call loss.backward() in it, or run the graph under torch.no_grad()",
        ),
        (
            trains and options.loss_scale is not None,
            learns,
            SbpError,
            f"{name} has loss_scale={options.loss_scale} and no optimizer: gradients would be left with the scale\n"
            "  give it the optimizer, or leave loss_scale= out and scale the loss by a torch.amp.GradScaler",
        ),
        (
            options.skip_nonfinite,
            learns,
            SbpError,
            f"{name} has skip_nonfinite=True and no optimizer, so there is no step that could be left out\n"
            "  give it the optimizer, or leave skip_nonfinite= out and look at the gradients before yours steps",
        ),
        (
            options.leave_gradients,
            passes.scale is None,
            SbpError,
            f"{name} has leave_gradients=True and weights in fp16, whose gradients have the scale of a loss\n"
            "  cast the weights to bf16, or have the step update: leave leave_gradients= out",
        ),
        (
            validates,
            learns,
            SbpError,
            f"{name} has post_validation=True and no optimizer\n  give it one, or leave post_validation= out",
        ),
        (
            validates,
            mixing is None,
            SbpError,
            f"{name}: post_validation steps a chunk of the model at a time, and {mixing} may look at more of it\n"
            f"  take one of {', '.join(sorted(of.__name__ for of in ALONE))}, or leave post_validation= out",
        ),
        (
            passes.scale is not None,
            flushes,
            ScheduleError,
            f"{changing} trains them in fp16\n  {unknown}: take bf16, or a schedule with a flush, such as '1f1b'",
        ),
        (
            options.skip_nonfinite,
            flushes,
            ScheduleError,
            f"{changing} is to leave steps out\n  {unknown}: take a schedule with a flush, such as '1f1b'",
        ),
    )
    for asked, holds, error, says in laws:
        if asked and not holds:
            raise error(says)


def refuse_left(graph: Physical, name: str) -> None:
    """An error where gradients are to be left, and an optimizer has states in another way than weights: whoever steps
    it, clips and clears gradients has to do so on the model's own parameters."""
    for source in graph.sources:
        of, rest = source.value.layout, source.master
        if source.offload is None and (rest.state, rest.dtype) == (of.state, of.dtype):
            continue
        there = f"on the {source.offload}" if source.offload else f"as {_said(rest)}"
        raise SbpError(
            f"{name} has leave_gradients=True, and the optimizer's states of {source.value.name} rest {there}, where "
            f"nobody looks who steps it: the weights lie as {_said(of)}\n"
            "  have states rest as weights do, such as both in pieces (ZeRO-3); or leave leave_gradients= out, to have "
            "the step update"
        )


def _said(of: Layout) -> str:
    sbp = ", ".join(map(str, of.sbp))
    return f"({sbp}) in {str(of.dtype).removeprefix('torch.')}"


def refuse_gradients(inputs: Mapping[str, Tensor], piped: bool) -> None:
    """Gradients would end at the graph, and what comes before it would not be trained; micro-batches give none."""
    for path, x in inputs.items():
        if not (x.requires_grad and torch.is_grad_enabled()):
            continue
        if piped:
            raise SbpError(
                f"the argument {path} requires grad, which a step in micro-batches does not give\n"
                "  leave micro_batches= and schedule= out, or pass it detached"
            )
        if not x.is_leaf:
            raise SbpError(
                f"the argument {path} {tuple(x.shape)} was computed from something that requires grad\n"
                "  no gradient would go back from the graph to there\n"
                "  compute it inside of the graph, or pass x.detach()"
            )
