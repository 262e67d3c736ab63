"""Expert code: what a layer of experts makes of tokens, each paired with one expert that it chose, by name.

An op of a graph names its code, so that its text says which it is, and equal layers have equal ops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["ACTS", "ExpertCode", "ResultKind", "code_named", "keep_code"]

# What each pair of a token [pairs, in] and the number of an expert gives, [pairs, out]: of tokens, numbers, shares,
# weights with a dim of those experts first, and weights that all experts share.
PairFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
ResultKind: TypeAlias = tuple[int, torch.dtype]  # how wide the result is, and its dtype

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, eq=False)
class ExpertCode:
    """The computation of a layer of experts. It is `linear` where a share of two gives twice as much as one of one."""

    run: PairFunction
    made: Callable[[Tensor, Sequence[Tensor]], ResultKind]  # of the tokens and the weights of experts
    linear: bool = True


_CODES: dict[str, ExpertCode] = {}


def keep_code(name: str, code: ExpertCode) -> str:
    """Have ops find this code by its name, which it returns."""
    _CODES[name] = code
    return name


def code_named(name: str) -> ExpertCode:
    return _CODES[name]


def _two_products(act: Callable[[Tensor], Tensor]) -> PairFunction:
    """`act(x @ up) @ down` of each expert, one after the other; with a gate where `up` is twice as wide."""

    def run(x: Tensor, expert: Tensor, share: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        up, down = stacks
        order = expert.argsort(stable=True)
        loads = expert.bincount(minlength=len(up)).tolist()
        made = []
        for at, tokens in enumerate(torch.split(x[order], loads)):
            if len(tokens):
                wide = tokens @ up[at]
                gate, other = wide.chunk(2, -1) if up.shape[2] != down.shape[1] else (wide, None)
                inner = act(gate) if other is None else act(gate) * other
                made.append(inner @ down[at])
        out: Tensor = torch.cat(made)[order.argsort()] * share[:, None]
        return out

    return run


for _name, _act in ACTS.items():
    keep_code(_name, ExpertCode(_two_products(_act), lambda x, stacks: (stacks[1].shape[2], x.dtype)))
