"""Names: which values of files a model's names stand for.

Files of transformers may have other names than the model, and other tensors: a base model without its head, the experts
of a layer one by one. transformers knows how to rename and convert them; here its own conversions run, on tensors that
have no numbers and note what is done with them, so that each value can be read in parts.
"""

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ...placement.errors import FileError
from .values import Concatenated, FileTensor, FileValue, Narrowed, Transposed, Unsqueezed

__all__ = ["spared_names", "values_by_name"]


def values_by_name(
    model: nn.Module, files: Mapping[str, FileTensor], wanted: Collection[str]
) -> Mapping[str, FileValue]:
    """The values of files under the names that the model has; those that it has no name for keep their own."""
    core = _conversions(model)
    if core is None:
        return files
    transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, core.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(wanted, True)
    found: dict[str, FileValue] = {}
    groups: dict[str, Any] = {}  # of the names that one conversion makes, the first
    for name in sorted(files, key=core.dot_natural_key):
        new, pattern = core.rename_source_key(name, renamings, converters, prefix, known)
        if new not in known and name in known:
            new, pattern = name, None
        if pattern is None or new not in known:
            _add(found, new if new in known else name, files[name])
        else:
            if new not in groups:
                groups[new] = deepcopy(by_pattern[pattern])
            groups[new].add_tensor(new, name, pattern, Recorded(files[name]))
    for new, converter in groups.items():
        for name, value in _converted(model, new, converter).items():
            _add(found, name, value)
    return found


def spared_names(model: nn.Module, kind: str, names: Collection[str]) -> set[str]:
    """The missing or unexpected names that a model of transformers says it does not mind."""
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected":  # buffers that older versions saved
        buffers = [name for name, _ in model.named_buffers()]
        patterns |= {rf"{last}$" for last in OLD_BUFFERS if any(name.endswith(last) for name in buffers)}
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


OLD_BUFFERS = ("rotary_emb.inv_freq", "position_ids")


def _conversions(model: nn.Module) -> Any:
    """transformers' module of conversions where the model is one of transformers."""
    bases = [f"{each.__module__}.{each.__name__}" for each in type(model).__mro__]
    if "transformers.modeling_utils.PreTrainedModel" not in bases:
        return None
    try:
        return import_module("transformers.core_model_loading")
    except ImportError:  # before 5 a model's names were those of its files
        return None


def _add(found: dict[str, FileValue], name: str, value: FileValue) -> None:
    if name in found:
        both = [next(each.tensors()).name for each in (found[name], value)]
        raise FileError(
            f"flow.load: {both[0]} and {both[1]} of the files are both {name} of the model\n"
            "  save one of them only, under the model's own name"
        )
    found[name] = value


def _converted(model: Any, new: str, converter: Any) -> dict[str, FileValue]:
    taken = [each.of.name for group in converter.collected_tensors.values() for each in group]
    try:
        made = converter.convert(new, model=model, config=model.config)
        pairs = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {name: value.of for name, value in pairs.items()}
    except Exception as error:
        ops = ", ".join(type(op).__name__ for op in converter.operations)
        raise FileError(
            f"flow.load: {taken[0]} of the files is not as {type(model).__name__} has it, nor made so in parts\n"
            f"  of {len(taken)} tensors transformers makes {new} by {ops}: {type(error).__name__}: {error}\n"
            "  save it as the model has it: safetensors.torch.save_file(model.state_dict(), file) after from_pretrained"
        ) from error


class Recorded:
    """A value of files as conversions see it: a tensor of this shape, which notes what is done with it."""

    def __init__(self, of: FileValue) -> None:
        self.of = of

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.of.shape)

    @property
    def ndim(self) -> int:
        return len(self.of.shape)

    def size(self, dim: int) -> int:
        return self.of.shape[dim]

    def contiguous(self) -> "Recorded":
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = CONVERSIONS.get(function)
        if run is None:
            raise NotImplementedError(f"{getattr(function, '__name__', function)} of a part of it is not known")
        return run(*args, **(kwargs or {}))


def _cat(tensors: list[Recorded], dim: int = 0) -> Recorded:
    first, *others = [each.shape for each in tensors]
    dim %= len(first)
    for other in others:
        if (*first[:dim], *first[dim + 1 :]) != (*other[:dim], *other[dim + 1 :]) or len(first) != len(other):
            raise ValueError(f"{tuple(first)} and {tuple(other)} along dim {dim}")
    return Recorded(Concatenated(tuple(each.of for each in tensors), dim))


def _stack(tensors: list[Recorded], dim: int = 0) -> Recorded:
    dim %= tensors[0].ndim + 1
    return _cat([Recorded(Unsqueezed(each.of, dim)) for each in tensors], dim)


def _split(tensor: Recorded, sizes: list[int], dim: int = 0) -> tuple[Recorded, ...]:
    dim %= tensor.ndim
    if sum(sizes) != tensor.shape[dim]:
        raise ValueError(f"{tuple(tensor.shape)} along dim {dim} in {sizes}")
    lows = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(Recorded(Narrowed(tensor.of, dim, low, size)) for low, size in zip(lows, sizes, strict=True))


def _chunk(tensor: Recorded, chunks: int, dim: int = 0) -> tuple[Recorded, ...]:
    size = tensor.shape[dim]
    each = -(-size // chunks)  # torch.chunk's law: as large as the first, but for the last
    return _split(tensor, [min(each, size - low) for low in range(0, size, each)], dim)


def _transpose(tensor: Recorded, dim0: int, dim1: int) -> Recorded:
    return Recorded(Transposed(tensor.of, (dim0 % tensor.ndim, dim1 % tensor.ndim)))


CONVERSIONS: dict[Any, Any] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}
