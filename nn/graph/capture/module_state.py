"""The state of modules while a graph is captured: fakes in the place of parameters and buffers, under their names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from ....placement.errors import SbpError
from ....placement.structure import part_at, walk
from ....sbp.layout import dense_strides, memory_gaps, memory_order
from ...eager.capture import new_fake
from ...model.cast import Types, types_of
from ...tensors.handle import attributes
from ...tensors.tensor import GlobalTensor
from .surroundings.containers import Containers

__all__ = ["Constant", "ModuleState", "HeldTensor", "fake_like"]


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A parameter or buffer: its first name, the real tensor, its fake, and the types that are said of it."""

    name: str
    kind: Literal["parameter", "buffer"]
    real: Tensor
    fake: Tensor
    types: Types | None = None


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that a module holds as an ordinary attribute, or that is kept by another `kind` of thing."""

    name: str
    real: Tensor
    read: Callable[[], Tensor]
    kind: str = "a plain attribute"


def fake_like(fakes: FakeTensorMode, real: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor like another on the device, without values: the same shape and strides, the same dtype or `dtype`. One
    of another dtype lies without gaps."""
    shape = tuple(real.shape)
    if isinstance(real, GlobalTensor):
        order, gaps = real._layout.order, real._layout.gaps
    elif real.layout is torch.strided and not real.is_nested:
        order, gaps = memory_order(real), memory_gaps(real)
    else:
        order = gaps = ()
    strides = gaps if gaps and dtype in (None, real.dtype) else dense_strides(shape, order)
    return new_fake(fakes, shape, strides, dtype or real.dtype, device).requires_grad_(real.requires_grad)


class ModuleState:
    """Swaps the tensors of modules for fakes, and puts back all that the modules were, and what lies beside them.
    Parameters are of the type that they are to rest in. `fakes` are of the capture, which runs `program`."""

    def __init__(
        self, modules: Mapping[str, nn.Module], device: str, fakes: FakeTensorMode, program: Any = None
    ) -> None:
        self.fakes = fakes
        self.paths: dict[int, str] = {}  # by the identity of modules
        self.modules: list[nn.Module] = []
        self.slots: list[HeldTensor] = []
        self.by_real: dict[int, HeldTensor] = {}
        self.around = Containers(lambda x: isinstance(x, FakeTensor) and x.fake_mode is fakes)
        self._program = program
        self._before: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]] = []
        self._types = types_of(modules)
        for prefix, root in modules.items():
            for path, module in root.named_modules(prefix=prefix):
                if isinstance(module, torch.jit.ScriptModule):
                    raise SbpError(
                        f"capture: {path or 'the model'} is TorchScript, whose calls are not seen\n"
                        "  use the Python module that it was made of"
                    )
                if id(module) not in self.paths:
                    self.paths[id(module)] = path
                    self.modules.append(module)
        for module in self.modules:
            for kind, values in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, real in values.items():
                    if real is not None:
                        self._add(_join(self.paths[id(module)], name), kind, real, device)

    def _add(self, name: str, kind: Any, real: Tensor, device: str) -> None:
        if is_lazy(real):
            raise SbpError(
                f"capture: {name} has no shape yet\n  run the model once on plain tensors, which makes lazy modules"
            )
        if id(real) not in self.by_real:
            types = self._types.get(name)
            fake = fake_like(self.fakes, real, device, types.weights if types and kind == "parameter" else None)
            if kind == "parameter":
                fake._is_param = True  # nn.Parameter(fake) detaches twice for the same
                vars(fake).update(attributes(real))
            self.by_real[id(real)] = slot = HeldTensor(name, kind, real, fake, types)
            self.slots.append(slot)

    def __enter__(self) -> "ModuleState":
        self.around.keep(self.modules, self._program)
        self._before = [(module, dict(module.__dict__), dict(module._buffers)) for module in self.modules]
        try:
            for module in self.modules:
                for values in (module._parameters, module._buffers):
                    for name, real in values.items():
                        if real is not None:
                            values[name] = self.by_real[id(real)].fake  # type: ignore[assignment]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        interrupt: KeyboardInterrupt | None = None
        while self._before:
            try:
                self.around.restore()
                self._before = []
            except KeyboardInterrupt as come:  # in the midst of it: the rest is put back first
                interrupt = come
        if interrupt is not None:
            raise interrupt

    def assigned(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that now hold another tensor, with it."""
        for module, _, buffers in self._before:
            for name, real in buffers.items():
                now = module._buffers.get(name)
                if real is not None and now is not None and now is not self.by_real[id(real)].fake:
                    yield self.by_real[id(real)].name, now

    def kept(self) -> Iterator[tuple[str, tuple[int, str], Any, Tensor]]:
        """The plain attributes that are another tensor now: path, module and name, what was there, and the tensor."""
        for module, own, _ in self._before:
            for name, now in vars(module).items():
                if isinstance(now, Tensor) and own.get(name) is not now:
                    yield _join(self.paths[id(module)], name), (id(module), name), own.get(name), now

    def cached(self, real: Tensor) -> Constant | None:
        """A tensor that a function has computed before, and keeps."""
        name = "" if real.requires_grad else self.around.caches.known(real)
        return Constant(f"cache of {name} {id(real)}", real, lambda: real, "in a cache of calls") if name else None

    def constants(self) -> dict[int, Constant]:
        """The tensors among the attributes of modules, by identity, also those in structures."""
        found: dict[int, Constant] = {}
        for module, own, _ in self._before:
            for name, value in own.items():
                if name not in ("_parameters", "_buffers", "_modules") and not name.endswith("_hooks"):
                    for keys, real in walk(value, Tensor, (name,)):
                        path = _join(self.paths[id(module)], ".".join(map(str, keys)))
                        if id(real) not in self.by_real:
                            found.setdefault(id(real), Constant(path, real, _reader(module, keys)))
        return found


def _reader(module: nn.Module, keys: tuple[Any, ...]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        value: Any = module.__dict__.get(keys[0])
        for key in keys[1:]:
            value = part_at(value, key)
        found: Tensor = value
        return found

    return read


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
