"""The same code on one plain tensor and on global tensors of every layout: what both give, and where it differs."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S

__all__ = ["LAYOUTS", "X", "Y", "Maker", "differs", "net"]

LINE, GRID = flow.placement("cpu", range(4)), flow.placement("cpu:[0-3] as (data=2, tensor=2)")
LAYOUTS: dict[str, tuple[flow.Placement, tuple[Any, ...]]] = {
    "B": (LINE, (B,)),
    "S(0)": (LINE, (S(0),)),
    "S(1)": (LINE, (S(1),)),
    "P": (LINE, (P,)),
    "S(0), P": (GRID, (S(0), P)),
    "S(0), S(1)": (GRID, (S(0), S(1))),
}
X = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 7 - 1
Y = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6)


class Maker:
    """Makes tensors of one layout, of as much of it as fits a shape; plain ones without a layout."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def sbp(self, value: Tensor) -> tuple[Any, ...]:
        assert self.name is not None
        return tuple(
            B if (isinstance(e, type(S(0))) and e.dim >= value.ndim) or (e == P and value.dtype == torch.bool) else e
            for e in LAYOUTS[self.name][1]
        )

    def __call__(self, value: Tensor, grad: bool = False) -> Tensor:
        if self.name is None:
            return value.clone().requires_grad_(grad)
        return flow.tensor(value, placement=LAYOUTS[self.name][0], sbp=self.sbp(value), requires_grad=grad)

    def module(self, module: nn.Module) -> nn.Module:
        if self.name is None:
            return module
        return flow.nn.to_global(module, LAYOUTS[self.name][0], lambda _, value: self.sbp(value))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def read(value: Any) -> Any:
    """Tensors by their whole value and what users see of them."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if isinstance(value, flow.GlobalTensor) else value
        return value.dtype, value.requires_grad, whole.detach().clone()
    if isinstance(value, dict):
        return {name: read(part) for name, part in value.items()}
    return [read(part) for part in value] if isinstance(value, list | tuple) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):  # sums come in another order
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-6, 1e-9, equal_nan=True)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(1, abs(a)) or (a != a and b != b)
    return bool(a == b)


def outcome(law: Callable[[Maker], Any], make: Maker) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read(law(make))
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError) as error:
            return type(error).__name__, "raised"
        except ValueError as error:
            return ("Severed" if "had to be moved" in str(error) else "ValueError"), "raised"


def differs(law: Callable[[Maker], Any], *, severed: bool = False) -> list[str]:
    """Where it gives something else than on one tensor; `severed` lets it refuse to write to a moved view."""
    wanted = outcome(law, Maker(None))
    found = []
    for name in LAYOUTS:
        got = outcome(law, Maker(name))
        if not same(wanted, got) and not (severed and got == ("Severed", "raised")):
            found.append(f"{name}: {str(got)[:200]}, not {str(wanted)[:200]}")
    return found
