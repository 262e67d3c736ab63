"""Generation: `model.generate` of transformers, whose forwards are steps of a graph.

model.generate     picks tokens, and prepares masks and positions, on plain tensors that every rank has
model.forward      the step for the prompt's length, then that for one token more: two kinds of arguments, two plans
cache              static; its tensors are global, and lie as the steps leave them
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...placement.errors import SbpError
from ...placement.structure import mapped
from ..eager.refusals import run_untraced
from ..graph.compiled import CompiledGraph
from ..graph.reads.watch import building
from ..tensors.tensor import GlobalTensor

__all__ = ["Generation", "generation"]


class Generation:
    """A model whose `generate` runs by a step, until this is closed; a `with` closes it.

    Where gradients are on, and where a graph is captured, the model's own forward runs.
    """

    def __init__(self, step: CompiledGraph[Any, ..., Any], max_length: int | None) -> None:
        self.step, self.model, config = step, step.model, step.model.generation_config
        said = {"cache_implementation": "static", "disable_compile": True, "max_cache_len": max_length}
        self._before = {name: getattr(config, name, None) for name in said}
        config.update(**said)
        self._own = vars(self.model).get("forward")
        self.model.forward = _StepForward(step, self.model.forward)

    @property
    def captures(self) -> int:
        """How many steps there are: one for each length of a prompt, and one for each size of a batch that decodes."""
        return sum(map(len, self.step._steps.values()))

    def close(self) -> None:
        """Give the model its own forward back, and the settings that it had."""
        if isinstance(vars(self.model).get("forward"), _StepForward):
            del self.model.forward
            if self._own is not None:
                self.model.forward = self._own
            self.model.generation_config.update(**self._before)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self.model).__name__}.generate by {self.captures} steps"


class _StepForward:
    """In the place of a model's forward: runs the step, and gives plain tensors, whole on every rank."""

    def __init__(self, step: CompiledGraph[Any, ..., Any], own: Callable[..., Any]) -> None:
        self.step, self.own = step, own
        functools.update_wrapper(self, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if building() or torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        result = self.step(*args, **kwargs)
        if isinstance(result, dict):  # as those of transformers are, which take long to be made anew
            for name, value in result.items():
                result[name] = _plain(value)
            return result
        return _plain(result)


def _plain(value: Any) -> Any:
    return mapped(value, GlobalTensor, GlobalTensor.full_tensor)


def generation(step: CompiledGraph[Any, ..., Any], *, max_length: int | None = None) -> Generation:
    """Have `model.generate` of transformers run by the step that `flow.compile(model, plan=...)` made of the model.

    Caches have room for `max_length` tokens, or as many as a call asks for: then other lengths are other steps.
    Returned is what tells of it, and takes it back: `.captures`, `.close()`.
    """
    if not isinstance(step, CompiledGraph) or step.loss is not None:
        raise SbpError(
            f"generation by {type(step).__name__}{' with a loss function' if isinstance(step, CompiledGraph) else ''}\n"
            "  give it a step that is the model's forward, as in flow.nn.generation(flow.compile(model, plan=plan))"
        )
    if not isinstance(step.model, nn.Module) or not hasattr(step.model, "generation_config"):
        raise SbpError(
            f"{type(step.model).__name__} has no generate\n  give it a model of transformers that has, such as one of "
            "AutoModelForCausalLM"
        )
    if isinstance(vars(step.model).get("forward"), _StepForward):
        raise SbpError(
            f"{type(step.model).__name__} generates by a step already\n  close that one first: generation.close()"
        )
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise SbpError(f"max_length={max_length!r}\n  say for how many tokens caches have room, as in 512")
    return Generation(step, max_length)


run_untraced(_StepForward.__call__)
