"""Training calls in a captured step, instead of autograd and optimizers: a backward is noted, a step waits.

The graph does the backward and the optimizer's step itself. Calls that cannot be captured are refused with a fix.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.autograd import Function
from torch.nn.modules import module as calls
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ....boxing.record import is_ours, user_line
from ....placement.errors import SbpError
from ....sbp.call import tensors_in
from ...eager.bags import bag_of_rows
from ...model.recompute.around import replace_around
from ...transforms.flex_attention import IN_OPS, picking
from .calls.policy import policy_of
from .calls.transforms import is_wrapped, transformed
from .interceptor import data_dependent
from .packed import packing

__all__ = ["Questions", "around"]

Lost = Callable[[Tensor, Tensor | None], None]
Region = Callable[..., AbstractContextManager[None]]  # perhaps of a policy

_GRAD: Any = getattr(torch.Tensor.grad, "__get__")  # noqa: B009  # to a type checker `grad` is a tensor
_NEEDS: Any = (torch.Tensor.requires_grad_, getattr(torch.Tensor.requires_grad, "__set__"))  # noqa: B009
_VALUES: dict[Any, str] = {torch.Tensor.numpy: "x.numpy()", torch.Tensor.__array__: "x.numpy()"}
_SCALER_STEPS = ("unscale_", "step", "update")
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class Questions(TorchFunctionMode):
    """Refuses what Python asks of fakes and no ATen call would show: gradients, values. `started` is told of tensors
    whose place in memory is asked for, `leaf` of those that need gradients from now on, `hooked` of hooks on these.
    For micro-batches it keeps samples apart that an ATen call would mix."""

    def __init__(
        self,
        started: Callable[[Tensor], None],
        leaf: Callable[[Tensor], None],
        hooked: Callable[..., Any],
        *,
        samples_apart: bool = False,
    ) -> None:
        super().__init__()
        self.started, self.leaf, self.hooked = started, leaf, hooked
        self.lost = False  # whether backward() was called
        self.samples_apart = samples_apart
        self.stand_aside: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, torch is as it was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRAD and self.lost and isinstance(args[0], FakeTensor):
            if sys._getframe(1).f_code is not nn.Module.zero_grad.__code__:
                raise SbpError(
                    f"capture: a gradient is read while the step is captured, at {user_line()}\n"
                    "  there is none yet: the graph computes gradients when it runs\n"
                    "  to clip them, give the graph clip_grad_norm=...; to look at them, leave out the optimizer, and "
                    "read p.grad after the step"
                )
        elif func is torch.Tensor.storage_offset and isinstance(args[0], FakeTensor):
            if not is_ours(sys._getframe(1).f_code.co_filename):
                self.started(args[0])
        elif func is torch._assert and isinstance(args[0], FakeTensor):  # as all checks of values: it is none here
            return None
        elif func is torch.nn.functional.embedding_bag and self.samples_apart:
            made = bag_of_rows(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        elif func in _VALUES and isinstance(args[0], FakeTensor):
            raise data_dependent(_VALUES[func], user_line(), "")
        elif func in _NEEDS and isinstance(args[0], FakeTensor) and not args[0].requires_grad:
            made = func(*args, **(kwargs or {}))
            if args[0].requires_grad:
                self.leaf(args[0])
            return made
        elif func in _HOOKS and isinstance(args[0], FakeTensor) and args[0].requires_grad:
            if func is not torch.Tensor.register_hook:
                raise SbpError(
                    f"capture: a hook is called after a gradient is added up, at {user_line()}\n"
                    "  put it on the parameter before, outside of the step: hooks of parameters are called at each"
                )
            return self.hooked(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def around(
    asked: Questions,
    lost: Lost,
    call: Callable[..., Any],
    own: Callable[..., Any],
    region: Region,
    scaled: Callable[[GradScaler, Any], Any],
    derived: Callable[..., Any],
) -> Iterator[None]:
    """Until the end, replace `backward()` by `lost(loss, gradient)`, calls of modules by `call(run, module, args,
    kwargs)`, `torch.autograd.grad` by `derived`, and calls of functions with their own backward by `own(apply, cls,
    args)`. `torch.utils.checkpoint` runs its function in a `region()`, and `scale` of a GradScaler gives
    `scaled(scaler, outputs)`."""
    run, grad, apply = nn.Module.__call__, torch.autograd.grad, Function.__dict__["apply"]

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_backward_hooks(self)
        return call(run, self, args, kwargs)

    ours: list[tuple[Any, str, Any]] = [
        (nn.Module, "_apply", _unchanged),
        (nn.Module, "__call__", called),
        (torch.autograd, "backward", _backward(asked, lost)),
        (torch.autograd, "grad", _grad(grad, derived)),
        *IN_OPS,
        picking(),
        (Function, "apply", _applied(apply, own, region)),
        (Optimizer, "zero_grad", _nothing),
        (GradScaler, "scale", lambda scaler, outputs: scaled(scaler, outputs)),
        *((GradScaler, name, _refused_scaler(name)) for name in _SCALER_STEPS),
    ]
    hook = register_optimizer_step_pre_hook(_without_parameters)
    undo_around = replace_around(lambda _: _within(region))
    asked.stand_aside = _putting([(owner, name, vars(owner)[name]) for owner, name, _ in ours])
    try:
        with _putting(ours)(), packing():
            yield
    finally:
        hook.remove()
        undo_around()


def _putting(values: Sequence[tuple[Any, str, Any]]) -> Callable[[], AbstractContextManager[None]]:
    """A context inside of which attributes of classes and modules are these."""

    @contextmanager
    def put() -> Iterator[None]:
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in values]
        try:
            for owner, name, value in values:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    return put


def _refuse_backward_hooks(module: nn.Module) -> None:
    """Refuse backward hooks: full ones end in torch's "please open an issue", because no gradient is there yet; others
    are never called."""
    own = module._backward_hooks or module._backward_pre_hooks
    if own or calls._global_backward_hooks or calls._global_backward_pre_hooks:
        of = f"{type(module).__name__} has a backward hook" if own else "all modules have a backward hook"
        raise SbpError(
            f"capture: {of}; {type(module).__name__} is called at {user_line()}\n"
            "  a graph makes gradients without calling it: remove it\n"
            "  hooks on parameters are called, as in module.weight.register_hook(...); a torch.autograd.Function in "
            "the forward changes gradients of what lies between"
        )


def _refused_scaler(name: str) -> Callable[..., None]:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise SbpError(
            f"capture: GradScaler.{name} at {user_line()} is called in the step that a graph captures, once for all\n"
            "  leave the optimizer out of the graph, and call scaler.step(optimizer) and scaler.update() behind it; or "
            "cast weights to fp16 by flow.nn.cast, for which the graph scales the loss itself"
        )

    return refused


def _backward(asked: Questions, lost: Lost) -> Callable[..., None]:
    def noted(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if create_graph or inputs:
            what = "create_graph=True" if create_graph else "inputs="
            raise SbpError(
                f"capture: backward({what}...) at {user_line()}\n"
                "  a graph gives every parameter its gradient, once: call loss.backward()"
            )
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
        given = given + [None] * (len(losses) - len(given))
        for loss, gradient in zip(losses, given, strict=True):
            if not loss.requires_grad:
                raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
            if gradient is None and loss.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            lost(loss, gradient)
        asked.lost = True

    return noted


def _grad(plain: Callable[..., Any], captured: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, *more: Any, **kwargs: Any) -> Any:
        wrapped = any(map(is_wrapped, tensors_in([outputs])))
        return (plain if transformed() or wrapped else captured)(outputs, *more, **kwargs)

    return grad


def _within(region: Region) -> Callable[..., Iterator[None]]:
    """The context that `checkpoint(use_reentrant=False)` has around the function that it calls."""

    def around(function: Any, args: Any, kwargs: Any, *, context_fn: Any, **settings: Any) -> Iterator[None]:
        with region(policy_of(context_fn)):
            yield

    return around


def _applied(apply: Any, own: Callable[..., Any], region: Region) -> Any:
    def instead(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *rest = args
            checkpoint.check_backward_validity(rest)
            # As in torch, parameters inside get no gradient if no argument wants one.
            wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in rest)
            with region(), torch.set_grad_enabled(wanted):
                return function(*rest)
        if transformed():
            raise SbpError(
                f"capture: {cls.__name__} has a backward of its own and is called inside of a transform of torch.func\n"
                f"  called at {user_line()}\n  call it outside, or write what it computes in torch's functions"
            )
        inner = cls.__module__.startswith(
            ("torch._library", "torch.utils.checkpoint")
        )  # in an op, or made of inputs alone
        if not inner and torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in([args, kwargs])):
            return own(apply.__get__(None, cls), cls, args)
        return apply.__get__(None, cls)(*args, **kwargs)

    return classmethod(instead)


def _unchanged(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stands for `module.to(...)` and its kin: a module that is of that type already stays what it is."""
    held = self if recurse else nn.ParameterList()
    tensors = [*self._parameters.items(), *self._buffers.items(), *held.named_parameters(), *held.named_buffers()]
    for name, x in tensors:
        if x is None:
            continue
        with torch.no_grad():
            became = fn(x)
        if became.dtype is not x.dtype or became.device != x.device or became.shape != x.shape:
            raise SbpError(
                f"capture: {type(self).__name__} is converted at {user_line()}: its {name} is {x.dtype} on "
                f"{x.device.type}, and is to be {became.dtype} on {became.device.type}\n"
                "  a step changes parameters by its optimizer alone\n"
                "  convert it before the graph is made, as in model.to(...), or say in which type it computes by "
                "flow.nn.cast"
            )
    return self


def _nothing(self: Optimizer, set_to_none: bool = True) -> None:
    """The graph drops gradients itself."""


def _without_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Arguments for `step` under which it changes nothing: another optimizer, that has no parameters."""
    idle = object.__new__(type(optimizer))
    idle.__dict__.update(optimizer.__dict__)
    idle.__dict__.update(param_groups=[], state={})
    return (idle, *args[1:]), kwargs
