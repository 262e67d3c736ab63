"""Plans that models of transformers bring along, as lines of the language of plans.

    base_model_tp_plan = {"layers.*.self_attn.o_proj": "rowwise"}        a config of transformers
    model.layers.*.self_attn.o_proj.weight: tensor=S(1)  # rowwise       what is taken of it
    model.layers.*.self_attn.o_proj.bias: tensor=B  # rowwise

A style there says how weights are cut, and what is sent before and behind a module. Here the first is enough, and what
has to be sent follows: the result of a row-wise product is P, and is summed where somebody needs the sum.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ...placement.errors import SbpError
from ...sbp import B, S, Sbp
from ..model.slots import joined_path, slots

__all__ = ["KINDS", "STYLES", "Style", "taken"]

KINDS = ("tp_plan", "ep_plan", "pp_plan")
Cut = Callable[[str, int], Sbp]  # the signature of a parameter with a name and so many dims


def _whole(name: str, ndim: int) -> Sbp:
    return B


def _rows(name: str, ndim: int) -> Sbp:
    """The cut of a matrix, or each of a stack, along the result's dim. A bias has but one."""
    return S(max(ndim - 2, 0))


def _columns(name: str, ndim: int) -> Sbp:
    """The dim that meets the input; a bias is added once, whole."""
    return B if name == "bias" else S(ndim - 1)


def _first(name: str, ndim: int) -> Sbp:
    return S(0)


def _last(name: str, ndim: int) -> Sbp:
    return S(ndim - 1)


@dataclass(frozen=True)
class Style:
    """A style of transformers in signatures: the cut of parameters, the flow of a module's input or result, and whether
    it gathers. `why` tells why there is nothing to say."""

    cut: Cut | None = None
    flow: Sbp | None = None
    gathers: bool = False
    why: str = ""


_ROWS, _COLUMNS, _WHOLE = Style(_rows), Style(_columns), Style(_whole)
_GATHERED = Style(_rows, gathers=True)
_SUMMED = Style(why="addends are summed where a sum is needed")
_EXPERTS = Style(why="its weights say it")
STYLES: dict[str, Style] = {  # with names that earlier releases of transformers have for some, such as colwise_rep
    "colwise": _ROWS,
    "local_colwise": _ROWS,
    "packed_colwise": _ROWS,  # a signature does not say how a dim is cut inside: in halves first, where that is of use
    "local_packed_colwise": _ROWS,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _COLUMNS,
    "local_rowwise": _COLUMNS,
    "packed_rowwise": _COLUMNS,
    "local_packed_rowwise": _COLUMNS,
    "rowwise_split_input": _COLUMNS,
    "rowwise_rep": _COLUMNS,
    "embedding_rowwise": Style(_first),
    "embedding_colwise": Style(_last, gathers=True),
    "grouped_gemm": Style(_first),
    "sequence_parallel": Style(_whole, flow=S(1)),
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "gather": _SUMMED,
    "all_reduce": _SUMMED,
    "moe_tp_experts": _SUMMED,
    "moe_identity_expert": Style(why="a sum counts what every rank has once"),
    "ep_dispatch_experts": _EXPERTS,
    "ep_router": _EXPERTS,
    "local": _EXPERTS,
    "local_params": _EXPERTS,
}


def taken(model: nn.Module, over: str, what: str = "tp_plan") -> list[str]:
    """The lines of the model's own plan, each with the style that it comes from; `over` is an axis of the grid.

    A plan is of the model, or of models in it, as transformers has put it together from their configs. Its words on
    modules that this model does not have become comments.
    """
    if what not in KINDS:
        raise SbpError(f"take {what!r}: there is no plan of this name\n  there are {', '.join(KINDS)}")
    said = {joined_path(owner, key): style for owner, plan in _plans(model, what) for key, style in plan.items()}
    if what == "pp_plan":
        return _stages(model, over, said)
    _check_styles(model, what)
    known = _KnownPaths(model)
    met = {path for path in said if known.modules(path) or known.parameters(path)}
    if not any("*" in path for path in met):
        raise _missing(model, over, what, said)
    lines: list[str] = []
    for path, name in said.items():
        lines += known.lines(path, name, over, said) if path in met else [f"# {path}: {name}, not in this model"]
    return lines


def _plans(model: nn.Module, what: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The plans of the outermost modules that have one, with the paths of these."""
    found: dict[str, Mapping[str, Any]] = {}
    for path, module in model.named_modules():
        plan = vars(module).get(f"_{what}")
        inside = any(owner == "" or path.startswith(f"{owner}.") for owner in found)
        if isinstance(plan, Mapping) and plan and not inside:
            found[path] = plan
    return list(found.items())


def _check_styles(model: nn.Module, what: str) -> None:
    for owner, plan in _plans(model, what):
        for key, style in plan.items():
            if style not in STYLES:
                raise SbpError(
                    f"take {what}: {joined_path(owner, key)} of {type(model).__name__} is {style!r}, "
                    "which is no known style\n"
                    f"  known are {', '.join(STYLES)}\n"
                    f"  take it out, del {joined_path('model', owner)}._{what}[{key!r}], and say by hand how it lies"
                )


class _KnownPaths:
    """The modules and parameters of a model, to be met by patterns in which a star is one part of a path."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self.dims = {slot.full: slot.value.ndim for slot in slots({"": model}) if slot.kind == "parameter"}

    def modules(self, pattern: str) -> list[str]:
        return list(filter(_meets(pattern), self.paths))

    def parameters(self, pattern: str) -> list[str]:
        return list(filter(_meets(pattern), self.dims))

    def lines(self, path: str, name: str, over: str, said: Mapping[str, Any]) -> list[str]:
        """The lines of one entry: one for a module where all in it lie alike, else one for each of its parameters."""
        style, found = STYLES[name], list[str]()
        if style.cut is not None:
            found = [f"{pattern}: {over}={entry}" for pattern, entry in self._laid(path, style.cut, said).items()]
        if style.flow is not None:
            found += [f"{path} <- {over}={style.flow}", f"{path} -> {over}={style.flow}"]
        gathered = style.gathers and "*" not in path
        if gathered:  # not in layers, where plans gather for ops that cannot be split, such as heads of packed weights
            found.append(f"{path} -> {over}=B")
        note = f"{name}, gathered where that is needed" if style.gathers and not gathered else name
        why = style.why or "without parameters of its own"
        return [f"{line}  # {note}" for line in found] or [f"# {path}: {name}, {why}"]

    def _laid(self, path: str, cut: Cut, said: Mapping[str, Any]) -> dict[str, Sbp]:
        """The signatures of the parameters that a pattern names, or that modules named by it hold; by patterns."""
        if self.parameters(path):
            return self._of_one(path, cut)
        own, each = self.parameters(f"{path}.*"), dict[str, Sbp]()
        for name in dict.fromkeys(full.rpartition(".")[2] for full in own):
            if f"{path}.{name}" not in said:  # a pattern of its own says more
                each |= self._of_one(f"{path}.{name}", cut)
        entries = {self._entry(full, cut) for full in own}
        alone = own == self.parameters(f"{path}.**")  # modules inside of these have parameters too
        return {path: entries.pop()} if each and alone and len(entries) == 1 else each

    def _of_one(self, pattern: str, cut: Cut) -> dict[str, Sbp]:
        """The one signature of the parameters that a pattern meets; if they differ in it, that of each."""
        found = {full: self._entry(full, cut) for full in self.parameters(pattern)}
        return {pattern: next(iter(found.values()))} if len(set(found.values())) == 1 else found

    def _entry(self, full: str, cut: Cut) -> Sbp:
        return cut(full.rpartition(".")[2], self.dims[full]) if self.dims[full] else B


@cache
def _meets(pattern: str) -> Callable[[str], bool]:
    """Whether a path is met: `*` is any part of one name, `**` any number of names."""
    parts = {"*": "[^.]*", "**": ".*"}
    text = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*+)", pattern))
    return lambda path, fits=re.compile(text).fullmatch: fits(path) is not None  # type: ignore[misc]


def _stages(model: nn.Module, over: str, said: Mapping[str, Any]) -> list[str]:
    """Lines that cut the longest list of layers into stages; modules before and behind it go to their neighbours."""
    longest = next((path for path in _lists(model) if path in said), None)
    if longest is None:
        raise _missing(model, over, "pp_plan", said)
    rest = [f"# {path}: where its neighbours are" for path in said if path != longest]
    return [f"pipe {longest} over {over}  # pp_plan", *rest]


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of layers that are in no other, the longest first."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(path.startswith(f"{one}.") for one in found):
            found[path] = module
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _missing(model: nn.Module, over: str, what: str, said: Mapping[str, Any]) -> SbpError:
    of, config = type(model).__name__, getattr(model, "config", None)
    head = f"that of {of} says nothing of its layers, only of {', '.join(said)}" if said else f"{of} has none"
    where = f"base_model_{what} of {'its config' if config is None else type(config).__name__} is not set"
    by_hand = _by_hand(model, over, what)
    fix = "say by hand, as in" + "".join(f"\n    {line}" for line in by_hand) if by_hand else "leave the line out"
    return SbpError(f"take {what}: {head}\n  such plans come from transformers: {where}\n  {fix}")


def _by_hand(model: nn.Module, over: str, what: str) -> list[str]:
    """Lines that hold for this model and say the like of such a plan."""
    lists = _lists(model)
    if not lists:
        return []
    path, layers = next(iter(lists.items()))
    if what == "pp_plan":
        return [f"pipe {path} over {over}"]
    if what == "ep_plan":
        stacks = [name for name, value in layers[0].named_parameters() if value.ndim == 3]
        return [f"{path}.*.{name}: {over}=S(0)" for name in stacks]
    turned = {  # Conv1D of transformers holds its weight the other way round
        name: type(module).__name__ == "Conv1D"
        for name, module in layers[0].named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    first, last = next(iter(turned), ""), next(reversed(turned), "")
    ends = {first: int(turned[first]), last: int(not turned[last])} if turned else {}
    return [f"{path}.*.{name}.weight: {over}=S({dim})" for name, dim in ends.items()]
