"""Refusals: what is said of options, optimizers and arguments with which a captured step could not do what is asked."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...boxing.graph.physical import Op, Physical
from ...placement.device import family
from ...placement.errors import SbpError, SbpflowError, ScheduleError
from ...placement.world import device, owned, world
from ...sbp import Layout
from ...sbp.logical import PART, Logical
from .instructions.instruction import Instruction
from .optimizer.on_shards import ALONE
from .passes import Passes

__all__ = ["card_of_plan", "refuse", "refuse_draws", "refuse_gradients", "refuse_left", "refuse_recording"]

LEAVE = "leave cuda_graph= out"


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


def refuse_recording(graph: Physical, logical: Logical, name: str) -> None:
    """An error where what is planned has to be done by the host at each step."""
    for what, fix in (*_of_devices(graph), *_of_ops(graph), *_of_values(graph)):
        raise SbpError(f"{name} has cuda_graph=True, and {what}\n  {fix}")
    if any(source.starts for source in logical.sources):
        raise SbpError(
            f"{name} has cuda_graph=True, and goes by where an argument starts in its memory: a graph has copies\n"
            f"  pass tensors that have a memory of their own, as x.clone() has, or {LEAVE}"
        )


def _of_devices(graph: Physical) -> Iterator[tuple[str, str]]:
    for kind in sorted({value.layout.placement.type for value in graph.values.values()}):
        if family(kind).graphs is None:
            yield (
                f"lies on {family(kind).title}, which has no graphs of its own",
                f"place it on a card, as in flow.placement('cuda', [0]); or {LEAVE}",
            )


def _of_ops(graph: Physical) -> Iterator[tuple[str, str]]:
    for step in graph.steps:
        at = f"at {step.origin.line or 'no line'}"
        if isinstance(step, Op) and step.op.namespace == PART:
            yield f"{step.op} runs eagerly, {at}: Python is not called when a graph is replayed", LEAVE
        if step.origin.offload is not None:
            yield f"what is saved {at} is offloaded, which the host copies", f"offload nothing, or {LEAVE}"


def _of_values(graph: Physical) -> Iterator[tuple[str, str]]:
    for source in graph.sources:
        if source.offload is not None:
            yield (
                f"the optimizer's states of {source.value.name} lie on the {source.offload}, where the host steps",
                f"have states rest on cards, or {LEAVE}",
            )
    for back in graph.backs:
        if back.encoding is not None:
            yield (
                f"compresses the gradient of {back.of}, whose errors the host keeps",
                f"leave compress= out, or {LEAVE}",
            )


def refuse_draws(todo: Sequence[Instruction], name: str) -> None:
    """An error where random numbers are drawn again for the backward, which takes a generator back."""
    if any(register.kind == "chance" for do in todo for register in do.registers):
        raise SbpError(
            f"{name} has cuda_graph=True, and a region that is run again for the backward draws random numbers: the "
            f"host sets the generator back for it\n  recompute what draws none, or {LEAVE}"
        )


def card_of_plan(graph: Physical, name: str) -> torch.device:
    """The one card on which all of it lies."""
    if world().rank is not None:
        raise SbpError(
            f"{name} has cuda_graph=True in one of several processes, whose moves the host takes part in\n"
            f"  {LEAVE}: it records steps of one process"
        )
    where = {device(v.layout.placement, r) for v in graph.values.values() for r in owned(v.layout.placement)}
    if len(where) > 1:
        raise SbpError(
            f"{name} has cuda_graph=True and lies on {', '.join(sorted(map(str, where)))}: the memory of a graph is of "
            f"one card\n  put all ranks on one, as in CUDA_VISIBLE_DEVICES=0, or {LEAVE}"
        )
    return where.pop()
