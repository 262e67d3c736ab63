"""Refusals: what is said of options, optimizers and arguments with which a captured step could not do what is asked."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...placement.errors import SbpError, SbpflowError, ScheduleError
from .optimizer.on_shards import ALONE
from .passes import Passes

__all__ = ["refuse", "refuse_gradients"]


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
