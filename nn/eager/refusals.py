"""Ways past `__torch_function__`: they would see a global tensor's empty shell, and are closed.

What C++ code does of itself, such as `torch.tensor(x)` and `plain.set_(x)`, is an ATen call on the shell, and
`__torch_dispatch__` refuses all but `x.set_(y)` of a global tensor. The rest is closed one by one: torch.distributed
sends the shell's memory, tracers would record what a process does with its shards. torch.func and forward-mode
differentiation wrap tensors without any call, and are let in by `nn/transforms`.
"""

import linecache
from functools import wraps
from typing import Any

import torch._vmap_internals
import torch.export
import torch.fx.experimental.proxy_tensor
from torch import Tensor, nn

from ...boxing.record import user_line
from ...placement.errors import SbpError
from ...sbp.call import tensors_in
from ..tensors.autograd import set_data
from ..tensors.moves import describe
from ..tensors.tensor import GlobalTensor

__all__ = ["install", "refuse_sending", "run_untraced"]

_MOVE = "x.to_global(sbp=...) moves it, x.to_local() is the shard that torch.distributed may send"
_COMPILE = "flow.compile(model, loss, optimizer) or flow.nn.Graph makes a graph of it, each rank's part compiled"
_DENSE = "global tensors are dense; pad the sequences to one length, or take x.full_tensor()"
_CLOSED = {
    (torch, "asarray"): (
        "torch.asarray",
        "it is a tensor already: x.clone() is a copy, x.to(dtype), x.requires_grad_()",
    ),
    (torch._vmap_internals, "_create_batched_inputs"): (
        "a vectorized jacobian of torch.autograd.functional",
        "torch.func.jacfwd(f)(x) is the same, and torch.func.jacrev(f)(x) backward",
    ),
    (torch.autograd, "_make_grads"): (
        "backward from a plain tensor with a global gradient",
        "its gradient is plain: g.full_tensor(), or make the tensor global by flow.tensor",
    ),
    (torch.utils, "swap_tensors"): (
        "torch.utils.swap_tensors",
        "graphs and optimizers know it as it is: x.data = y puts the other's values there, and x.copy_(y) copies them",
    ),
    (torch, "compile"): ("torch.compile", _COMPILE),
    (torch.jit, "trace"): ("torch.jit.trace", _COMPILE),
    (torch.jit, "script"): ("torch.jit.script", _COMPILE),
    (torch.nested, "as_nested_tensor"): ("torch.nested", _DENSE),
    (torch.export, "export"): ("torch.export", _COMPILE),
    (torch.fx.experimental.proxy_tensor._MakefxTracer, "trace"): (
        "make_fx",
        f"{_COMPILE}; in the place of torch.func.linearize take torch.func.jvp, or vjp",
    ),
}
_script = torch.jit.script
# Through these go all collectives of torch.distributed, where it was built.
_SENT = ("_check_single_tensor", "_check_tensor_list")


def _close(module: Any, name: str, what: str, instead: str) -> None:
    inner = getattr(module, name)

    @wraps(inner)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_global, (*args, *kwargs.values()))):
            raise SbpError(f"{what}: not for global tensors\n  {instead}")
        if inner is _script:  # names of a function are looked up where it is called from, which is a frame further now
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        return inner(*args, **kwargs)

    setattr(module, name, asked)


def _is_global(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(isinstance(part, GlobalTensor) for part in tensors_in(value))
    value = getattr(value, "__self__", value)  # of a module's method
    if isinstance(value, nn.Module) and "_parameters" in vars(value):  # not one that is just being made
        return any(isinstance(part, GlobalTensor) for part in value.parameters())
    return isinstance(value, GlobalTensor)


def refuse_sending(func: Any) -> None:
    """Functions and ops of torch.distributed that do ask."""
    home = str(getattr(func, "__module__", "")), str(getattr(func, "namespace", ""))
    if home[0].startswith("torch.distributed.") or home[1] in ("c10d", "_c10d_functional"):
        raise SbpError(f"{getattr(func, '__name__', func)} of torch.distributed: not for global tensors\n  {_MOVE}")


def _answer_shell(
    cls: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """An op that reached a shell: nothing that asks `__torch_function__` does, so that this costs nothing."""
    if op is torch.ops.aten.set_.source_Tensor and isinstance(args[0], GlobalTensor):
        if args[0] is not args[1]:
            set_data(*args)
        return args[0]
    found = [t for t in tensors_in((args, kwargs or {})) if isinstance(t, GlobalTensor)]
    line = user_line()
    path, _, number = line.rpartition(":")
    said = linecache.getline(path, int(number)).strip()
    raise SbpError(
        f"torch would read the memory of a global tensor, of which every rank has a part, by {op}\n"
        + "".join(f"  {describe(x)}\n" for x in found[:4])
        + (f"  at {line}: {said}" if said else f"  at {line}")
        + "\n  x.full_tensor() is the whole as a plain tensor, x.to_local() the shard, x.clone() a copy that is global"
    )


def _missing(x: GlobalTensor, name: str) -> Any:
    """Attributes that are not found; of what torch made of the class alone that is the layout."""
    if "_layout" not in vars(x):
        raise TypeError("this GlobalTensor has no shards: it is made by flow.tensor or flow.from_local alone")
    raise AttributeError(f"{type(x).__name__!r} object has no attribute {name!r}")


def _plain_data() -> property:
    """`Tensor.data` as it is, but that a plain tensor's memory cannot become a shell's: C++ code swaps the two."""
    inner: Any = torch._C.TensorBase.data

    def put(x: Tensor, value: Any) -> None:
        if isinstance(value, GlobalTensor):
            raise SbpError(
                f"data of a plain tensor cannot be that of a global one\n  {describe(value)}\n"
                "  make it global by flow.tensor or flow.nn.to_global, or give it value.full_tensor()"
            )
        inner.__set__(x, value)

    return property(inner.__get__, put, doc=inner.__doc__)


def run_untraced(answer: Any) -> None:
    """A function that `torch.compile` made calls this one, and does not look into it."""
    answer._torchdynamo_disable = True
    answer._torchdynamo_disable_msg = f"it answers for global tensors; {_COMPILE}"
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP  # it, and all that it calls
    frames.set_code_exec_strategy(answer.__code__, frames._FrameExecStrategy(skip, skip))


def install() -> None:
    """Close them, once."""
    GlobalTensor.__torch_dispatch__ = classmethod(_answer_shell)  # type: ignore[assignment]
    GlobalTensor.__getattr__ = _missing  # type: ignore[attr-defined]
    torch.Tensor.data = _plain_data()  # type: ignore[assignment]
    run_untraced(GlobalTensor.__torch_function__.__func__)  # type: ignore[attr-defined]
    for (module, name), (what, instead) in _CLOSED.items():
        _close(module, name, what, instead)
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d

        for name in _SENT:
            if hasattr(distributed_c10d, name):
                _close(distributed_c10d, name, "a collective of torch.distributed", _MOVE)
        _close(
            nn.parallel.DistributedDataParallel,
            "__init__",
            "DistributedDataParallel",
            "parameters that are B and a batch that is S(0) are data parallelism already; call the module itself",
        )
