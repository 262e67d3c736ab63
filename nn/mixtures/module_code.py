"""A module's own forward as expert code: run on pairs of a token and an expert, on the weights of some of its experts.

A module that is called with tokens, the numbers of experts that each chose, and its shares of them is taken for a layer
of experts. What it computes need not be known: its forward is run by a copy, which holds the weights of some experts
alone, and whose numbers of experts say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..model.slots import joined_path

__all__ = ["ModuleCode", "ModuleExperts", "ways_to_see"]

_TENSORS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class ModuleExperts:
    """How the tensors of a module, by their paths, are those of so many experts.

    `stacks` have a dim of experts first, or where their entry here is more than 1, so many rows of each; `shared` are
    those of all experts, and `counts` the attributes that tell their number.
    """

    count: int
    stacks: Mapping[str, int]
    shared: tuple[str, ...]
    counts: tuple[tuple[str, str], ...]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their paths."""
    found = {}
    for path, part in module.named_modules():
        for kept in (part._parameters, part._buffers):
            found.update({joined_path(path, name): x for name, x in kept.items() if x is not None})
    return found


def ways_to_see(module: nn.Module) -> Iterator[ModuleExperts]:
    """Ways in which a module's tensors could be those of experts, the likeliest first."""
    held = {name: tuple(x.shape) for name, x in tensors_of(module).items()}
    named = [(path, name, value) for path, name, value in _numbers(module) if "expert" in name]
    firsts = {shape[0] for shape in held.values() if len(shape) == 3}
    if len(firsts) == 1:
        (count,) = firsts
        counts = tuple((path, name) for path, name, value in named if value == count)
        for least in (1, 2):  # a vector may be as long as there are experts, by chance
            stacks = {name: 1 for name, shape in held.items() if len(shape) >= least and shape[0] == count}
            for told in (counts, ()) if counts else ((),):
                yield ModuleExperts(count, stacks, tuple(name for name in held if name not in stacks), told)
    elif not firsts:  # rows of experts, one expert behind the other
        for count in dict.fromkeys(value for *_, value in named):
            counts = tuple((path, name) for path, name, value in named if value == count)
            rows = {name: shape[0] // count for name, shape in held.items() if len(shape) == 2 and count}
            if rows and all(shape[0] == count * rows[name] for name, shape in held.items() if name in rows):
                yield ModuleExperts(count, rows, tuple(name for name in held if name not in rows), counts)


def _numbers(module: nn.Module) -> Iterator[tuple[str, str, int]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) is int:
                yield path, name, value


class ModuleCode:
    """A module's forward as a function of pairs. `dims` are how many dims the module takes its tokens and choices in,
    and `keys` by which names or places it is given tokens, choices and shares."""

    def __init__(
        self, module: nn.Module, seen: ModuleExperts, dims: tuple[int, int], keys: Sequence[int | str]
    ) -> None:
        self.seen, self.dims, self.keys = seen, dims, tuple(keys)
        self.parts = {path: (type(part), dict(vars(part))) for path, part in module.named_modules()}
        for _, held in self.parts.values():
            for kind in _TENSORS:
                held[kind] = dict.fromkeys(held[kind])

    def __call__(
        self, x: Tensor, expert: Tensor, share: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> Tensor:
        """The result of each pair of a token and an expert, by its number among those whose weights are given."""
        tokens, choices = self.dims
        given = (
            x.reshape(*[1] * (tokens - 2), *x.shape),
            *(each.reshape(*[1] * (choices - 2), -1, 1) for each in (expert, share)),
        )
        made = self.called(given, stacks, shared)
        return made.reshape(len(x), made.shape[-1])

    def called(self, given: Sequence[Tensor], stacks: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        """The module's result of tokens, choices and shares in its own dims."""
        seen = self.seen
        folded = [w if rows == 1 else w.flatten(0, 1) for w, rows in zip(stacks, seen.stacks.values(), strict=True)]
        tensors = dict(zip((*seen.stacks, *seen.shared), (*folded, *shared), strict=True))
        module = self._module(tensors, len(stacks[0]))
        args = [x for _, x in sorted((k, x) for k, x in zip(self.keys, given, strict=True) if isinstance(k, int))]
        named: dict[str, Any] = {k: x for k, x in zip(self.keys, given, strict=True) if isinstance(k, str)}
        made: Tensor = module.forward(*args, **named)
        return made

    def _module(self, tensors: Mapping[str, Tensor], count: int) -> nn.Module:
        """A module like the one that was seen, with these tensors and so many experts."""
        made: dict[str, nn.Module] = {}
        for path, (cls, held) in self.parts.items():
            made[path] = part = object.__new__(cls)
            vars(part).update(held, **{kind: dict(held[kind]) for kind in _TENSORS})
            if path:
                around, _, name = path.rpartition(".")
                made[around]._modules[name] = part
        for path, value in tensors.items():
            around, _, name = path.rpartition(".")
            kept: Any = made[around]
            (kept._parameters if name in kept._parameters else kept._buffers)[name] = value
        for path, name in self.seen.counts:
            vars(made[path])[name] = count
        return made[""]
