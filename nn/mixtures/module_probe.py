"""The probe: whether a module is a layer of experts, tried by running its own forward on small values.

    all experts, all choices of each token     =     pairs of a token and one of the first experts
                                                   + pairs of a token and one of the others, numbered from 0

What holds for 48 tokens of random numbers, most of which chose the same expert, is taken to hold for all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .module_code import ModuleCode, ModuleExperts, ways_to_see

__all__ = ["NoExperts", "SeenExperts", "Shapes", "TokenCall", "ExpertTrial", "check_copied", "seen_experts", "touch"]

Shapes: TypeAlias = Mapping[str, tuple[Sequence[int], torch.dtype]]  # of a module's tensors, as they are used
TOKENS, EXPERTS, CHOICES = 48, 3, 2
WIDE, NARROW = 64, 16  # dims above the one are tried as multiples of the other
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FEW = 1  # the experts of the first part


class NoExperts(Exception):
    """The reason for which a module is no layer of experts, in words that follow its name."""


@dataclass(frozen=True)
class TokenCall:
    """The arguments of a module's call: how many dims tokens and choices have, by which names or places they are given
    with the shares, how wide tokens are, and their dtypes."""

    dims: tuple[int, int]
    keys: tuple[int | str, ...]
    width: int
    types: tuple[torch.dtype, torch.dtype]  # of tokens and shares


@dataclass(frozen=True, eq=False)
class SeenExperts:
    """A module's code, how wide its results are and of which dtype, and whether shares are but factors in it."""

    code: ModuleCode
    width: int
    dtype: torch.dtype
    linear: bool


def seen_experts(module: nn.Module, call: TokenCall, shapes: Shapes) -> SeenExperts:
    """The code of a module that is called so; `NoExperts` says what it does that no layer of experts does."""
    check_copied(module)
    held = ", ".join(f"{name} {tuple(shape)}" for name, (shape, _) in shapes.items())
    whys: list[str] = []
    for seen in ways_to_see(module):
        code = ModuleCode(module, seen, call.dims, call.keys)
        small = narrowed(call, shapes, seen)
        linear = None if small is None else _linear(code, *small, [])  # else all of it tells, and why
        if linear is None:
            linear = _linear(code, call, shapes, whys)
        if linear is not None:
            try:
                with torch.no_grad():
                    made = touch(code, shapes, call)
            except Exception as error:
                whys.append(_cannot(error))
                continue
            return SeenExperts(code, made.shape[-1], made.dtype, linear)
    raise NoExperts(next(iter(whys), f"no dim of experts is the first of its weights, {held}"))


def _linear(code: ModuleCode, call: TokenCall, shapes: Shapes, whys: list[str]) -> bool | None:
    """Whether shares are but factors; None if it is no layer of experts, for reasons that `whys` gets."""
    for dtype in dict.fromkeys((torch.float64, torch.float32, call.types[0])):  # some kernels take only some dtypes
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                return ExpertTrial(code, call, shapes, dtype).linear()
        except NoExperts as error:
            whys.append(str(error))
            return None
        except Exception as error:
            whys.append(_cannot(error))
    return None


def _cannot(error: Exception) -> str:
    return f"it cannot run with some of its experts: {type(error).__name__}: {str(error).splitlines()[0]}"


def narrowed(call: TokenCall, shapes: Shapes, seen: ModuleExperts) -> tuple[TokenCall, Shapes] | None:
    """The same call and weights with all wide dims in the proportions that they have, since drawing an expert of
    4096 x 28672 takes seconds; None where none is wide, or experts are rows.

    A module whose own numbers say how wide it is does not run so, and is tried as it is."""
    dims = {name: [*shape[name in seen.stacks :]] for name, (shape, _) in shapes.items()}
    wide = [n for n in (call.width, *(n for each in dims.values() for n in each)) if n > WIDE]
    by = gcd(*wide) // NARROW if wide else 0
    if by < 2 or any(rows > 1 for rows in seen.stacks.values()):
        return None

    def cut(n: int) -> int:
        return n // by if n > WIDE else n

    made = {
        name: ((*shape[: name in seen.stacks], *map(cut, dims[name])), dtype) for name, (shape, dtype) in shapes.items()
    }
    return replace(call, width=cut(call.width)), made


def touch(code: ModuleCode, shapes: Shapes, call: TokenCall) -> Tensor:
    """The result of one token and one expert, all zero: whatever the module reads of itself is read."""
    stacks = [
        torch.zeros((1, *_row(shapes[name][0], rows)), dtype=shapes[name][1], device="cpu")
        for name, rows in code.seen.stacks.items()
    ]
    shared = [torch.ones(*shapes[name][0], dtype=shapes[name][1], device="cpu") for name in code.seen.shared]
    x = torch.zeros((1, call.width), dtype=call.types[0], device="cpu")
    share = torch.ones(1, dtype=call.types[1], device="cpu")
    return code(x, torch.zeros(1, dtype=torch.long, device="cpu"), share, stacks, shared)


def _row(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    return tuple(shape[1:]) if rows == 1 else (rows, *shape[1:])


def check_copied(module: nn.Module) -> None:
    """Refuse what a copy of a module would not have."""
    for path, part in module.named_modules():
        held = vars(part)
        where = path or "it"
        plain = next((name for name, value in held.items() if isinstance(value, Tensor)), None)
        if plain is not None:
            raise NoExperts(f"{where} has the tensor {plain} as a plain attribute: make it a buffer, register_buffer")
        if "forward" in held:
            raise NoExperts(f"the forward of {where} was replaced: call another module in its place")
        if path and any(held[name] for name in HOOKS if name in held):
            raise NoExperts(f"{where} has hooks, which would see some tokens alone: take them off")


class ExpertTrial:
    """A module's code on values of a dtype; float weights are drawn, all else is what the module has."""

    def __init__(self, code: ModuleCode, call: TokenCall, shapes: Shapes, dtype: torch.dtype) -> None:
        self.code, self.call, self.held, self.dtype, self.seen = code, call, shapes, dtype, code.seen
        self.chance = torch.Generator().manual_seed(0)
        self.count = min(self.seen.count, EXPERTS)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.chance, dtype=torch.float64, device="cpu").to(self.dtype)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        stacks = []
        for name, rows in self.seen.stacks.items():
            shape, _ = self.held[name]
            inner = _row(shape, rows)
            stacks.append(self.drawn(self.count, *inner) / max(inner[-1:] or (1,)) ** 0.5)
        shared = []
        for name in self.seen.shared:
            shape, dtype = self.held[name]
            shared.append(
                self.drawn(*shape) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype, device="cpu")
            )
        return stacks, shared

    def choices(self) -> Tensor:
        """Most of the tokens choose the last expert first, and each another one besides."""
        many = min(CHOICES, self.count)
        first = torch.randint(self.count, (TOKENS,), generator=self.chance, device="cpu")
        first[: TOKENS * 3 // 4] = self.count - 1
        return torch.stack([(first + at) % self.count for at in range(many)], -1)

    def linear(self) -> bool:
        """Whether shares are but factors, of a module that is a layer of experts."""
        (stacks, shared), chosen = self.weights(), self.choices()
        x, share = self.drawn(TOKENS, self.call.width), self.drawn(*chosen.shape).abs() + 0.1
        lead = _lead(self.call.dims[0])
        given = (
            x.reshape(*lead, -1),
            *(each.reshape(*(_lead(self.call.dims[1])), -1) for each in (chosen, share)),
        )
        before = [w.clone() for w in (*given, *stacks, *shared)]
        whole = self.code.called(given, stacks, shared)
        if not isinstance(whole, Tensor) or whole.shape[:-1] != given[0].shape[:-1]:
            made = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise NoExperts(f"of tokens {tuple(given[0].shape)} it makes {made}, not a result for each token")
        if not all(map(torch.equal, before, (*given, *stacks, *shared))):
            raise NoExperts("it writes to its tensors or to what it is given")
        whole = whole.reshape(TOKENS, -1)
        if not self.same(self.code.called(given, stacks, shared).reshape(TOKENS, -1), whole):
            raise NoExperts("it makes something else of the same each time: has it dropout?")
        if not self.same(sum(self.parts(x, chosen, share, stacks, shared)), whole):
            raise NoExperts("its result is not the sum of what single experts make of single tokens")
        return self.same(sum(self.parts(x, chosen, 2 * share, stacks, shared)), 2 * whole)

    def parts(
        self, x: Tensor, chosen: Tensor, share: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """The results of the first experts, and of the others."""
        for first, end in ((0, FEW), (FEW, self.count)):
            tokens, choice = ((chosen >= first) & (chosen < end)).nonzero(as_tuple=True)
            if len(tokens):
                pairs = x[tokens], chosen[tokens, choice] - first, share[tokens, choice]
                made = self.code(*pairs, [w[first:end] for w in stacks], shared)
                yield made.new_zeros(TOKENS, made.shape[-1]).index_add(0, tokens, made)

    def same(self, a: Tensor | int, b: Tensor) -> bool:
        if not isinstance(a, Tensor) or a.shape != b.shape or not b.isfinite().all() or not b.any():
            return False
        return bool((a - b).abs().max() <= (1e-5 if b.dtype.itemsize >= 4 else 0.1) * b.abs().max())

    def made(self) -> tuple[int, torch.dtype]:
        """How wide results are, and their dtype, in the module's own dtypes."""
        made = touch(self.code, self.held, self.call)
        return made.shape[-1], made.dtype


def _lead(dims: int) -> tuple[int, ...]:
    """The dims of tokens before the last."""
    return (TOKENS,) if dims == 2 else (*[1] * (dims - 3), 2, TOKENS // 2)
