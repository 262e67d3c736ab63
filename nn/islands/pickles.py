"""Programs and results on their way between clients and an island.

A function goes by its module and name, and workers import it; of a client's `__main__` they load the file under another
name, so that what stands under `if __name__ == "__main__"` is not run. A handle goes as a number. A global tensor goes
home whole, by an exchange of all ranks, each of which pickles the same value.
"""

import hashlib
import importlib.util
import pickle
import secrets
import sys
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ..tensors.tensor import GlobalTensor
from .messages import ClientCode

__all__ = ["ClientModules", "Unpacker", "code_here", "file_of", "main_here", "packed_program", "packed_whole"]

MAIN = "__mp_main__"  # not "__main__", as multiprocessing names it too


class _Packer(pickle.Pickler):
    """Writes a value with tensors as `plain` gives them, and handles as the numbers that `number` has for them."""

    def __init__(self, plain: Callable[[Tensor], Tensor], number: Callable[[object], int | None]) -> None:
        self.file = BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self._plain, self._number = plain, number

    def persistent_id(self, x: Any) -> int | None:
        return self._number(x)

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return NotImplemented
        return self._plain(x).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]

    def packed(self, value: object) -> bytes:
        self.dump(value)
        return self.file.getvalue()


def packed_program(program: tuple[Any, ...], number: Callable[[object], int | None]) -> bytes:
    """A program as a client sends it. `number` gives the number of a handle, and None of anything else."""
    return _Packer(_sent, number).packed(program)


def packed_whole(value: object) -> bytes:
    """A value on its way home, its global tensors whole. All ranks call it at once."""
    return _Packer(_whole, lambda x: None).packed(value)


def _sent(x: Tensor) -> Tensor:
    if isinstance(x, GlobalTensor):
        raise SbpError(
            f"a global tensor of this process, {tuple(x.shape)} on {x.placement!r}, is an argument for an island\n"
            "  its ranks are others: give it x.full_tensor(), or the handle of a tensor that lies there"
        )
    return _lean(x)


def _whole(x: Tensor) -> Tensor:
    plain = x.detach().full_tensor() if isinstance(x, GlobalTensor) else x.detach()
    plain = _lean(plain.cpu())
    parameter = isinstance(x, torch.nn.Parameter) or getattr(x, "_is_param", False)
    return torch.nn.Parameter(plain, requires_grad=x.requires_grad) if parameter else plain


def _lean(x: Tensor) -> Tensor:
    """The tensor, or a copy where its memory is larger: all of a memory goes along."""
    if x.layout is not torch.strided or x.is_meta or type(x) is not Tensor:
        return x
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


class Unpacker(pickle.Unpickler):
    """Reads what the other side has packed; `module` gives those that have another name here, and `held` results."""

    def __init__(
        self, data: bytes, module: Callable[[str], ModuleType | None], held: Callable[[int], Any] | None = None
    ) -> None:
        super().__init__(BytesIO(data))
        self._module, self._held = module, held

    def persistent_load(self, number: Any) -> Any:
        if self._held is None:
            raise pickle.UnpicklingError("a handle, where none can be")
        return self._held(number)

    def find_class(self, module: str, name: str) -> Any:
        found: Any = self._module(module)
        if found is None:
            return super().find_class(module, name)
        for part in name.split("."):
            found = getattr(found, part)
        return found


# At a client


def code_here() -> ClientCode:
    """The places of this process's code, and a seed."""
    main, seed = sys.modules["__main__"], secrets.randbits(32)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return ClientCode(tuple(sys.path), None, seed)
    path = str(Path(file).resolve())
    return ClientCode(tuple(sys.path), (_main_name() or path, file_digest(path)), seed)


def main_here(name: str) -> ModuleType | None:
    """This process's `__main__`, under the names that it has at workers."""
    return sys.modules["__main__"] if name.startswith(MAIN) or name == _main_name() else None


def _main_name() -> str | None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # there is one under `python -m`
    return None if spec is None else str(spec.name)


def file_of(function: object) -> tuple[str, str] | None:
    """The module of a function, and the digest of its file; None where it has none, and for `__main__`."""
    name = str(getattr(function, "__module__", None))
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if name == "__main__" or file is None or not file.endswith(".py") else (name, file_digest(file))


@cache
def file_digest(path: str) -> str:
    """A short name of what is in a file, as it was when it was asked for first."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


# At a worker


class ClientModules:
    """The modules of a client as a worker has them. Those that it imported once stay as they were."""

    def __init__(self, code: ClientCode) -> None:
        self._code = code
        sys.path.extend(folder for folder in code.path if folder not in sys.path)

    def named(self, name: str) -> ModuleType | None:
        """The client's `__main__`; other modules have the same name here."""
        if name != "__main__":
            return None
        if self._code.main is None:
            raise SbpError("the client is no file, so that workers cannot load its functions\n  write them in a module")
        source, digest = self._code.main
        if not source.endswith(".py"):
            return self.check(source, digest)
        name = f"{MAIN}{digest}"
        if name not in sys.modules:
            if not Path(source).is_file() or file_digest.__wrapped__(source) != digest:
                raise SbpError(
                    f"{source} is not there, or was changed, since the client began\n  start the client anew"
                )
            spec = importlib.util.spec_from_file_location(name, source)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = made = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(made)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]

    def check(self, name: str, digest: str) -> ModuleType:
        """A module, refused if it is another one here than at the client."""
        found = importlib.import_module(name)
        if file_digest(str(found.__file__)) != digest:
            raise SbpError(
                f"the module {name} at the client is not the one that the island has imported, {found.__file__}\n"
                "  it was changed since then, or is another of this name: start the island anew"
            )
        return found
