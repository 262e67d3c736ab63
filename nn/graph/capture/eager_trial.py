"""Trials of eager parts: what a part gives back, learnt at capture by running it beside the capture.

First on tensors without values. A part that looks at values needs some: arguments of the step, parameters and buffers
have theirs, as far as they are plain tensors, and all others are made up, in several ways. What has other sizes for
other values is refused. Python's state, random numbers and modules are afterwards what they were.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from ....placement.errors import SbpError
from ....placement.structure import replaced
from ....sbp.call import Call, tensors_in
from ...eager.capture import quiet
from ...eager_parts.held import HeldTensors
from ...eager_parts.marks import EagerMark, parts_by
from ...eager_parts.part import PartTensor, leaves_of
from .calls.running_stats import NORMS
from .repeats.likeness import unnoted
from .surroundings.containers import Containers
from .surroundings.settings import Settings

__all__ = ["Learnt", "PartTrial"]

# What is made up in the place of floats, of whole numbers and of truths.
_Fill = tuple[Callable[[Tensor, torch.Generator], object], int, bool]
_FILLS: tuple[_Fill, ...] = (
    (lambda x, chance: x.uniform_(0.25, 0.75, generator=chance), 0, True),
    (lambda x, chance: x.fill_(0.0), 0, False),
    (lambda x, chance: x.fill_(1.0), 1, True),
    (lambda x, chance: x.normal_(generator=chance), 0, True),
)


@dataclass(frozen=True)
class Learnt:
    """The outcome of a run: what the part gave back as it was, and the held buffers that it wrote to."""

    result: Any
    written: tuple[int, ...]
    draws: bool

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        found = [leaf for _, leaf in leaves_of(self.result)]
        return [(tuple(x.shape), x.dtype) for x in found if isinstance(x, Tensor)]


class PartRefused(SbpError):
    """A part does what a graph could not do with it, whatever its values."""


Aside: TypeAlias = Callable[[], AbstractContextManager[None]]
Looked: TypeAlias = Callable[[Callable[[Any, Any, Any], None]], AbstractContextManager[None]]


class PartTrial:
    """Runs of one call: `given` are its arguments with `PartTensor`s, `fakes` the tensors of these and then those that
    are held, and `values` real ones of these, where there are. A capture stands `aside` meanwhile, and lets `calls` go
    by, where one may look at each of them."""

    def __init__(
        self,
        mark: EagerMark,
        given: Any,
        fakes: Sequence[Tensor],
        values: Sequence[Tensor | None],
        held: HeldTensors,
        place: str,
        aside: Aside,
        calls: Looked,
    ) -> None:
        self.mark, self.given, self.held, self.place = mark, given, held, place
        self.fakes, self.values = fakes, values
        self.aside, self.calls = aside, calls
        self.many = len(fakes) - len(held.tensors)

    def learnt(self) -> Learnt:
        """Run it, and tell what it gave back."""
        with self._apart():
            try:
                with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
                    return self._run([_stand_in(x, torch.empty_like) for x in self.fakes])
            except PartRefused:
                raise
            except Exception:  # it looks at values, or it is wrong, and fails once more
                return self._on_values()

    def of_values(self, tensors: Sequence[Tensor]) -> Any:
        """The result for these tensors."""
        with self._apart():
            return self._run(tensors).result

    @contextmanager
    def _apart(self) -> Iterator[None]:
        with self.aside(), unset_fake_temporarily(), self._unseen(), parts_by(None):
            yield

    def _on_values(self) -> Learnt:
        found: list[Learnt] = []
        errors: list[Exception] = []
        for fill in _FILLS:
            try:
                found.append(self._run(self._made_up(fill)))
            except PartRefused:
                raise
            except Exception as error:
                errors.append(error)
            if len(found) == 2:
                break
        if not found:
            raise self.refused(
                "could not be tried, which tells what it gives back",
                f"{type(errors[0]).__name__}: {errors[0]}\n"
                "  it was run on values that were made up, of the right sizes; have it take any values",
            ) from errors[0]
        first, *others = found
        for other in others:
            if other.kinds != first.kinds:
                one, two = (", ".join(str(shape) for shape, _ in each.kinds) for each in (first, other))
                raise self.refused(
                    f"gives back other sizes for other values: {one} and {two}",
                    "the graph around it has one size for all: pad what it gives back, or mark what is around it, so "
                    "that what follows runs eagerly too",
                )
        return first

    def _made_up(self, fill: _Fill) -> list[Tensor]:
        chance = torch.Generator().manual_seed(0)

        def made(x: Tensor, real: Tensor | None) -> Tensor:
            if real is not None:
                return _stand_in(x, lambda _: real.detach().to("cpu").clone())
            return _stand_in(x, lambda like: _filled(like, fill, chance))

        return [made(x, real) for x, real in zip(self.fakes, self.values, strict=True)]

    def _run(self, tensors: Sequence[Tensor]) -> Learnt:
        given, held = [_inner(x) for x in tensors[: self.many]], list(tensors[self.many :])
        before = [x._version for x in given], [x._version for x in held]
        args, kwargs = replaced(self.given, lambda _, ref: given[ref.number], objects=True, kind=PartTensor)
        leaves = [id(leaf) for _, leaf in leaves_of((args, kwargs))]
        kept = [leaf for _, leaf in leaves_of((args, kwargs))]  # while they live, their ids are not used again
        looking = _PartWatch(self, tensors)
        with self.held.holding(held), self.calls(looking.see):
            result = self.mark(*args, **kwargs)
            now = [self.held.now(at) for at in range(len(held))]
        if [id(leaf) for _, leaf in leaves_of((args, kwargs))] != leaves:
            raise self.refused("changes a list or object among its arguments", "have it return what it puts there")
        del kept
        if [x._version for x in given] != before[0]:
            raise self.refused("writes to a tensor that it is given", "have it return a new tensor")
        changed = [
            at
            for at, (x, old, version) in enumerate(zip(now, held, before[1], strict=True))
            if x is not old or x._version != version or id(x) in looking.written
        ]
        fixed = [self.held.names[at] for at in changed if self.held.kinds[at] == "parameter"]
        if fixed:
            raise self.refused(
                f"writes to the parameter {fixed[0]}", "a step changes parameters by its optimizer alone"
            )
        return Learnt(self._checked(result), tuple(changed), looking.draws)

    def _checked(self, result: Any) -> Any:
        if not any(isinstance(leaf, Tensor) for _, leaf in leaves_of(result)):
            raise self.refused(
                "gives back no tensor", "have it return one; a graph has no place for what returns nothing"
            )
        return result

    def refused(self, what: str, fix: str) -> "PartRefused":
        return PartRefused(f"capture: the eager part {self.mark.name}, called at {self.place}, {what}\n  {fix}")

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Inside, what the part does to Python's values is undone, and nobody takes note of what it reads."""
        settings, around = Settings(), Containers(lambda _: False)
        around.keep(self.held.modules, self.mark)
        try:
            with unnoted():
                yield
        finally:
            around.restore()
            around.undo()
            settings.restore()


class _PartWatch:
    """Looks at calls of a part: it refuses parameters that are none of the part's, whose gradients would be lost, and
    notes statistics that norms write without saying so."""

    def __init__(self, trial: PartTrial, ours: Sequence[Tensor]) -> None:
        self.trial, self.ours, self.written = trial, {id(x) for x in ours}, set[int]()
        self.draws = False
        self.mode = next((x.fake_mode for x in ours if isinstance(x, FakeTensor)), None)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in tensors_in([args, kwargs]):
            strange = x.fake_mode is not self.mode if isinstance(x, FakeTensor) else isinstance(x, nn.Parameter)
            if strange and id(x) not in self.ours:
                raise self.trial.refused(
                    f"uses a tensor {tuple(x.shape)} of a module that it is not given",
                    "mark the module, as in flow.nn.eager(model.criterion), or pass the tensor or the module to it",
                )
        self.draws = self.draws or Call(func, args, kwargs, ()).draws
        if func in NORMS and args[5]:
            self.written.update(id(x) for x in args[3:5] if x is not None)


def _stand_in(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor like this fake; one that requires grad does, and a parameter is one."""
    made = make(torch.empty(tuple(x.shape), dtype=x.dtype, device="cpu"))
    if isinstance(x, nn.Parameter):
        return nn.Parameter(made, requires_grad=x.requires_grad)
    return made.requires_grad_(x.requires_grad)


def _filled(x: Tensor, fill: _Fill, chance: torch.Generator) -> Tensor:
    floats, whole, truth = fill
    if x.is_floating_point() and x.dtype.itemsize > 1:
        floats(x, chance)
        return x
    if x.is_complex():
        return x.fill_(1.0)
    return x.fill_(truth if x.dtype is torch.bool else whole) if x.dtype.itemsize else x.zero_()


def _inner(x: Tensor) -> Tensor:
    """The tensor as what an op has made: no leaf, so that it may be written to."""
    with torch.enable_grad():
        return x * 1 if x.requires_grad else x
