"""Derivatives inside of a captured step: `torch.autograd.grad` of what the tape has, as more ops on the tape.

ops between     those of the tape that lead from an input to an output, and let gradients through
run again       under torch.func.vjp, on tensors that stand for the values that they had: what this records and
                nothing reads is dropped later
pulled          the gradients, by calls that are ops of the graph like others, so that losses may be made of them
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .....boxing.record import user_line
from .....placement.errors import SbpError
from .....sbp.call import fill, tensors_in
from .....sbp.logical import LogicalOp
from ..tape import Tape
from .transforms import unwrapped

__all__ = ["gradients"]


def gradients(
    tape: Tape,
    like: Callable[[Tensor], Tensor],
    paused: Callable[[], AbstractContextManager[None]],
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of captured outputs by captured inputs, as `torch.autograd.grad` gives them. `like` makes a
    tensor like another, with nothing of its history, where calls that the program did not make are `paused`."""
    outs, ins = tensors_in([outputs]), tensors_in([inputs])
    if is_grads_batched:
        raise _refusal("is_grads_batched=True", "call torch.vmap of a function of torch.func.vjp in its place")
    for x in (*outs, *ins):
        if not x.requires_grad:
            raise RuntimeError(f"torch.autograd.grad at {user_line()}: one of the tensors does not require grad")
    wanted, given = [tape.number(x) for x in outs], [tape.number(x) for x in ins]
    ops = _between(tape.ops, set(given), set(wanted))
    reached = {n for op in ops for n in op.inputs} | set(wanted)
    missed = [at for at, n in enumerate(given) if n not in reached]
    if missed and not (allow_unused or materialize_grads):
        raise RuntimeError(
            f"torch.autograd.grad at {user_line()}: the outputs do not depend on input {missed[0]}; "
            "allow_unused=True gives None for it"
        )
    _check(ops)
    cotangents = _cotangents(outs, grad_outputs)
    made = {n for op in ops for n in op.numbers}
    values: dict[int, Tensor] = {}
    with paused():
        for n in dict.fromkeys(n for op in ops for n in op.inputs if n not in made) | dict.fromkeys((*given, *wanted)):
            values[n] = like(tape.fakes[n])
            tape.stand_for(values[n], n)
    with torch.enable_grad():
        _, pull, *_ = torch.func.vjp(_TapeRun(tape, ops, values, given, wanted), *[values[n] for n in given])
        found = [g if create_graph else g.detach() for g in pull(tuple(cotangents))]
    zeros = [torch.zeros_like(x) if materialize_grads else None for x in ins]
    return tuple(zeros[at] if at in missed else g for at, g in enumerate(found))


def _between(ops: Sequence[LogicalOp], given: set[int], wanted: set[int]) -> list[LogicalOp]:
    """The ops through which gradients come from the wanted values to those given."""
    reached, found = set(given), []
    for op in ops:
        if op.grad and not reached.isdisjoint(op.inputs):
            if not given.isdisjoint(op.numbers):
                raise _refusal("inputs of which one is made of another", "call it for each of them")
            reached.update(op.numbers)
            found.append(op)
    needed, kept = set(wanted), []
    for op in reversed(found):
        if not needed.isdisjoint(op.numbers):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def _check(ops: Sequence[LogicalOp]) -> None:
    for op in ops:
        if not isinstance(op.op, torch._ops.OpOverload) or op.op.namespace != "aten":
            raise _refusal(f"{op.op}, called at {op.origin.line},", "call ops of torch alone in between")
        if torch.Tag.nondeterministic_seeded in op.op.tags or "dropout" in str(op.op):
            raise _refusal(
                f"{op.op}, called at {op.origin.line}, which draws random numbers,",
                "set its p to 0 (model.eval()), or call loss.backward() alone",
            )


def _refusal(what: str, fix: str) -> SbpError:
    return SbpError(f"capture: torch.autograd.grad at {user_line()} over {what} is not captured\n  {fix}")


def _cotangents(outs: Sequence[Tensor], given: Any) -> list[Tensor]:
    listed = [given] * len(outs) if given is None or isinstance(given, Tensor) else list(given)
    for out, each in zip(outs, listed, strict=True):
        if each is None and out.numel() != 1:
            raise RuntimeError(f"grad can be implicitly created only for scalar outputs, at {user_line()}")
    return [torch.ones_like(out) if each is None else each for out, each in zip(outs, listed, strict=True)]


class _TapeRun:
    """Runs ops of the tape again, with results that stand for the values that they had."""

    def __init__(
        self,
        tape: Tape,
        ops: Sequence[LogicalOp],
        values: Mapping[int, Tensor],
        given: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        self.tape, self.ops, self.values, self.given, self.wanted = tape, ops, values, given, wanted

    def __call__(self, *primals: Tensor) -> tuple[Tensor, ...]:
        values = dict(self.values) | dict(zip(self.given, primals, strict=True))
        for op in self.ops:
            made = tensors_in(op.op(*fill(op.args, values), **fill(op.kwargs, values)))
            for n, out in zip(op.numbers, made, strict=True):
                values[n] = out
                self.tape.stand_for(unwrapped(out), n)
        return tuple([values[n] for n in self.wanted])
