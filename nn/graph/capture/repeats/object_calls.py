"""Objects that layers are handed and that keep something, such as a cache of keys and values: calls of their methods.

    def forward(self, x, cache):
        k, v = cache.update(k, v, self.layer_idx)     this call is made for each layer; the ops around it are taken over

Which entry of the cache a layer has is nobody's to know but the cache's own. So a layer that stands for another has
every method that the other called called again, on its own values. That is exact where the layer did nothing else with
the object, and where a number of the layer, such as `layer_idx`, went into these calls and nowhere else.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor

from .....placement.errors import SbpError
from .....placement.structure import parts, replaced
from ....eager.capture import autocast_state
from ..interceptor import Interceptor
from ..tape import Tape
from .likeness import Number, Unlike, of_value
from .read_flow import argument_of

__all__ = ["MethodCall", "MethodCalls", "OtherAnswer", "modes", "objects_in"]

_LASTING = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)  # results that nobody can write to


class OtherAnswer(BaseException):
    """An object answered a layer otherwise than the one that stands for it: all layers are to be traced.

    No program is to catch it, because the object has changed already."""


@dataclass(frozen=True, eq=False)
class MethodCall:
    """A call of an object's method that a layer made while it was traced."""

    object: int  # its place among those of the layer's call
    name: str
    args: Any
    kwargs: Any
    numbers: Mapping[int, int]  # of the tensors among its arguments, by identity
    settings: Mapping[int | str, int]  # arguments that are numbers of the layer, with their places among its settings
    result: Any
    answer: tuple[int, ...]  # the numbers of the result's tensors
    module: str
    start: int  # of its ops
    end: int
    first: int  # of its values
    last: int

    def within(self, start: int) -> "MethodCall":
        """The call with its ops counted from that one."""
        return replace(self, start=self.start - start, end=self.end - start)

    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments and of its result."""
        found = list[Tensor]()
        of_value((self.args, self.kwargs, self.result), found)
        return found

    def arguments(self, settings: Sequence[Number], tensor: Callable[[Tensor], Tensor]) -> tuple[list[Any], Any]:
        """The arguments for another layer, with its tensors in the place of these."""
        args, kwargs = replaced((self.args, self.kwargs), lambda path, x: tensor(x))
        args = [settings[self.settings[at]].value if at in self.settings else value for at, value in enumerate(args)]
        return args, kwargs | {name: settings[at].value for name, at in self.settings.items() if isinstance(name, str)}

    def again(self, of: Any, args: list[Any], kwargs: Any) -> list[Tensor]:
        """Call the method of an object with other arguments; returned are the tensors of the result."""
        result = getattr(of, self.name)(*args, **kwargs)
        tensors, known = list[Tensor](), list[Tensor]()
        try:
            alike = of_value(result, tensors) == of_value(self.result, known)
        except Unlike:
            alike = False
        if not alike:
            raise OtherAnswer
        return tensors


class MethodCalls:
    """Notes the calls of methods of objects, and reads of a layer's numbers, while it is traced."""

    def __init__(self, tape: Tape, watch: Interceptor) -> None:
        self.tape, self.watch = tape, watch
        self.made: list[MethodCall] = []
        self.exact = True
        self.busy = False
        self._inside = False
        self._objects: list[Any] = []
        self._numbers: dict[tuple[int, str], int] = {}  # by module and name, with their places among the settings
        self._values: list[int] = []
        self._reads: list[tuple[tuple[int, str], FrameType, int]] = []  # that went nowhere yet

    @contextmanager
    def noted(self, objects: list[Any], settings: list[Number]) -> Iterator[None]:
        """Until the end, note what is called of these objects."""
        self.made, self.exact, self.busy, self._objects = [], True, True, objects
        self._numbers = {(id(each.module), each.name): at for at, each in enumerate(settings)}
        self._values = [each.value for each in settings]
        self._around = self._where()
        classes = dict.fromkeys(map(type, objects))
        before = [(cls, name, vars(cls).get(name)) for cls in classes for name in _WATCHED]
        try:
            for cls in classes:
                for name in _WATCHED:
                    setattr(cls, name, self._asked(getattr(cls, name), name))
            yield
        finally:
            for cls, name, own in before:
                setattr(cls, name, own) if own is not None else delattr(cls, name)
            self.busy = False

    def read(self, module: Any, name: str, frame: FrameType | None) -> bool:
        """Whether a read of an attribute by this frame may yet turn out to be an argument of a call."""
        key = id(module), name
        if not self.busy or key not in self._numbers or frame is None:
            return False
        self._reads.append((key, frame, frame.f_lasti))
        return True

    def unmatched(self) -> set[tuple[int, str]]:
        """The numbers that were read for something else."""
        found = {key for key, _, _ in self._reads}
        self._reads = []
        return found

    def _where(self) -> tuple[Any, ...]:
        """All around a call that a call made again finds as it is around its layer."""
        return modes(), self.watch.region, self.watch.policy, self.tape.placement, self.tape.lies

    def _asked(self, plain: Any, kind: str) -> Callable[..., Any]:
        def asked(one: Any, name: str, *value: Any) -> Any:
            made = plain(one, name, *value)
            at = next((at for at, each in enumerate(self._objects) if each is one), None)
            if self._inside or at is None or name == "__class__":
                return made
            if kind != "__getattribute__" or type(made) is not MethodType or made.__self__ is not one:
                self.exact = False
                return made

            @wraps(made.__func__)
            def called(_: Any, *args: Any, **kwargs: Any) -> Any:
                return self._called(at, name, made, args, kwargs)

            return MethodType(called, one)

        return asked

    def _called(self, at: int, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return method(*args, **kwargs)
        settings = self._settings(sys._getframe(2), args, kwargs)
        tape, given = self.tape, list[Tensor]()
        try:
            of_value((args, kwargs), given)
        except Unlike:
            self.exact = False
        start, first = len(tape.ops), len(tape.fakes)
        self._inside = True
        try:
            result = method(*args, **kwargs)
        finally:
            self._inside = False
        end, last = len(tape.ops), len(tape.fakes)
        fresh = list[Tensor]()
        self.exact = self.exact and _lasting(result) and self._where() == self._around
        if self.exact:
            of_value(result, fresh)
        with self.watch.paused():
            numbers, answer = self._known(given), self._known(fresh)
        if self.exact and numbers is not None and answer is not None:
            by_identity = dict(zip(map(id, given), numbers, strict=True))
            spans = start, end, first, last
            self.made.append(
                MethodCall(at, name, args, kwargs, by_identity, settings, result, answer, self.watch.module, *spans)
            )
        else:
            self.exact = False
        return result

    def _known(self, tensors: list[Tensor]) -> tuple[int, ...] | None:
        """Their numbers; None where one is not of the capture, or where code counts in its memory."""
        try:
            views = list(map(self.tape.view, tensors))
        except SbpError:
            return None
        return None if any(view.memory.counted for view in views) else tuple(map(self.tape.read, views))

    def _settings(self, frame: FrameType, args: Any, kwargs: Any) -> dict[int | str, int]:
        """The arguments of a call that are numbers of the layer, which were read for it alone."""
        found: dict[int | str, int] = {}
        for at in reversed(range(len(self._reads))):
            key, reader, line = self._reads[at]
            to = argument_of(frame.f_code, line, frame.f_lasti) if reader is frame else None
            if to is not None and to not in found:
                number = self._numbers[key]
                value = args[to] if isinstance(to, int) else kwargs[to]
                if type(value) is int and value == self._values[number]:
                    found[to] = number
                    del self._reads[at]
        return found


_WATCHED = ("__getattribute__", "__setattr__", "__delattr__")


def modes() -> tuple[Any, ...]:
    """The modes around a call besides the capture: gradients, the default dtype, autocast."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast_state()


def objects_in(value: Any) -> set[int]:
    """The identities of all that a structure is made of."""
    return {id(value)}.union(*(objects_in(part) for _, part in parts(value) or ()))


def _lasting(value: Any) -> bool:
    return isinstance(value, _LASTING) or (isinstance(value, tuple) and all(map(_lasting, value)))
