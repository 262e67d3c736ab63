"""A card that this machine lacks, while a step for it is captured: fakes of the host stand for its tensors.

Torch ends the process where fakes of a missing card meet autograd. So a step is traced on the host, and answered as on
the card wherever it names it: `x.device`, `x.cuda()`, `device="cuda"`, autocast.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from .....placement.device import DeviceFamily
from .....placement.errors import is_ours
from .....sbp.call import map_tensors
from ....eager.capture import CallWatch

__all__ = ["DescribedCard"]

_HOST = torch.device("cpu")


class DescribedCard(TorchFunctionMode):
    """Answers for a kind of card wherever a program names it."""

    def __init__(self, kind: DeviceFamily) -> None:
        super().__init__()
        self.kind = kind
        self.moves = getattr(Tensor, kind.name, None)
        asks = [getattr(Tensor, f"is_{name}", None) for name in (kind.name, _HOST.type)]
        self.asks = [getattr(each, "__get__", None) for each in asks]  # as modes are told of properties

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is self.moves:
            return args[0].to(_HOST, **{name: kwargs[name] for name in kwargs if name == "memory_format"})
        if args and isinstance(args[0], FakeTensor) and func in self.asks and not _asked_by_us():
            return func == self.asks[0]
        if func in (torch.histc, Tensor.histc) and args and not args[0].is_floating_point():
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)  # the host counts floats alone
        if "device" in kwargs:
            kwargs["device"] = self.host(kwargs["device"])
        every = func is Tensor.to
        return func(*(self.host(x) if every or isinstance(x, torch.device) else x for x in args), **kwargs)

    def host(self, value: Any) -> Any:
        """A device of this kind, or any other value, as the host is told of it."""
        if isinstance(value, int) and not isinstance(value, bool):  # the number of a card
            return _HOST
        if isinstance(value, str | torch.device) and str(value).partition(":")[0] == self.kind.name:
            return _HOST
        return value

    @contextmanager
    def heard(self, fakes: FakeTensorMode) -> Iterator[None]:
        """Until the end the program finds these fakes on the card, and autocast of the card is on where it says so."""
        where: Any = FakeTensor.device
        begin, there = torch.autocast.__init__, torch.device(self.kind.name, 0)
        module, capability = self.kind.module, "get_device_capability"
        asked = getattr(module, capability, None)

        def device(x: FakeTensor) -> torch.device:
            found: torch.device = where.fget(x)
            return there if found == _HOST and x.fake_mode is fakes and not _asked_by_us() else found

        def autocast(
            one: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
        ) -> None:
            if device_type != self.kind.name:
                begin(one, device_type, dtype, enabled and device_type != _HOST.type, cache_enabled)
            else:
                begin(one, _HOST.type, dtype or torch.get_autocast_dtype(device_type), enabled, cache_enabled)
                one.device = device_type

        FakeTensor.device, torch.autocast.__init__ = property(device), autocast  # type: ignore[assignment,method-assign]
        if asked is not None and self.kind.described is not None:
            setattr(module, capability, lambda device=None: self.kind.described)
        try:
            torch.set_autocast_enabled(_HOST.type, False)
            with self:
                yield
        finally:
            FakeTensor.device, torch.autocast.__init__ = where, begin  # type: ignore[method-assign]
            if asked is not None:
                setattr(module, capability, asked)

    def cast(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Makes the casts and the call that autocast of the card makes of a call, on the host.

        Tensors that record no gradients may be fakes of a missing card; the casts are read off what is done to these.
        """
        under, key = _Under(self.kind.name), torch._C.DispatchKeySet(self.kind.autocast)
        args, kwargs = map_tensors(args, under.probe), map_tensors(kwargs, under.probe)
        with torch.no_grad(), under, contextlib.suppress(_FoundError):
            func.redispatch(key, *args, **kwargs)
        return under.on_host


class _FoundError(Exception):
    """The call is known, and need not be made."""


class _Under(CallWatch):  # type: ignore[no-untyped-call]
    """Sees the casts that autocast makes of tensors, and then the call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.found: Any = None
        self.stands: dict[int, tuple[Tensor, Tensor]] = {}  # a probe, and for whom it stands, by identity of the probe

    def probe(self, x: Tensor) -> Tensor:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.kind)
        self.stands[id(made)] = made, x
        return made

    def on_host(self) -> Any:
        """The call with the tensors for which the probes stand."""
        func, args, kwargs = self.found
        with torch._C._DisableAutocast():
            return func(*map_tensors(args, self._cast), **map_tensors(kwargs, self._cast))

    def _cast(self, probe: Tensor) -> Tensor:
        _, x = self.stands[id(probe)]
        return x if x.dtype is probe.dtype else x.to(probe.dtype)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not torch.ops.aten.to.dtype:
            self.found = func, args, kwargs
            raise _FoundError
        made = func(*args, **kwargs)
        self.stands[id(made)] = made, self.stands[id(args[0])][1]
        return made


def _asked_by_us() -> bool:
    """Whether torch or this package asks: the function that called the caller of this one."""
    return is_ours(sys._getframe(2).f_code.co_filename)
