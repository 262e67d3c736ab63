"""Values for models that were built without them, under torch.device("meta"): each rank keeps its part at once.

Modules are initialised one by one, children before the module around them, as constructors do it. What a module holds
itself is for that moment a plain whole tensor; then it is cut, so a process needs memory for its own shards and one
module. All ranks draw the same whole numbers, so values do not depend on layouts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...boxing import box
from ...boxing.exchange.execute import token
from ...placement import Placement
from ...placement.errors import SbpError, SbpflowError
from ...placement.world import device as device_of
from ...placement.world import owned
from ...sbp import B, Layout, SbpLike, layout
from ...sbp.text import on_all_axes
from ..tensors import seeds
from ..tensors.factories import _fresh, whole_everywhere
from ..tensors.tensor import GlobalTensor, wrap
from .annotate import hints_of, near, placement_of
from .initialisers import Initialisers, blank, initialisers, ours, written
from .replacement import check_replaceable, replace
from .to_global import _same_values, _stale

__all__ = ["materialise"]

Init: TypeAlias = Callable[[str, Tensor], object]


def materialise(
    model: nn.Module,
    layouts: Mapping[str, Layout | SbpLike] | None = None,
    *,
    device: torch.device | str = "cpu",
    init: Init | None = None,
) -> None:
    """Make all parameters and buffers of a model global, in place, with initial values for those on meta.

    `layouts` has layouts, or signatures where `place` said on what, by full names; what it leaves out lies as `shard`
    said, or is B. Values are drawn on `device`, of torch's generator, by each module's `_init_weights` (that of the
    nearest module around it that has one: Hugging Face's way) or its `reset_parameters`. From one seed they are those
    of the same calls on one device, whatever the layouts. `init` fills by name and tensor what a module leaves empty.
    Values that are there already stay. After an error the model is as it was.
    """
    held = _held(model)
    lies = _lies(model, held, layouts or {})
    on = torch.device(device)
    _agree(model, on, {of.placement for of in lies.values()})
    work = _Work(model, held, lies, on, init)
    try:
        with torch.no_grad(), on:
            work.run()
    except BaseException:
        for each in held:
            each.put(each.value)
        raise
    work.settle()


@dataclass(eq=False, frozen=True, slots=True)
class _Held:
    """A parameter or buffer in its place; a tied one is in several."""

    full: str
    module: nn.Module
    table: dict[str, Any]
    name: str
    value: Tensor

    def put(self, value: Tensor) -> None:
        self.table[self.name] = value

    @property
    def kind(self) -> str:
        return "parameter" if isinstance(self.value, nn.Parameter) else "buffer"


def _held(model: nn.Module) -> list[_Held]:
    """The parameters and buffers that are not global yet."""
    found = []
    for path, module in _children_first(model):
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                full = f"{path}.{name}" if path else name
                if value is None or isinstance(value, GlobalTensor):
                    continue
                if is_lazy(value):
                    raise SbpError(f"materialise: {full} has no shape yet\n  run the lazy module on a batch first")
                check_replaceable(full, value, "materialise")
                found.append(_Held(full, module, table, name, value))
    return found


def _children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                yield from visit(f"{path}.{name}" if path else name, child)
        yield path, module

    return visit("", model)


def _lies(model: nn.Module, held: list[_Held], given: Mapping[str, Layout | SbpLike]) -> dict[int, Layout]:
    """The layout of every tensor, by its id; a tied one goes by all its names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    ids = {full: id(value) for full, value in named}
    for full in given:
        if full not in ids:
            raise SbpError(
                f"materialise: no parameter or buffer is called {full!r}\n"
                f"  there are {len(ids)}" + (f"; did you mean {close}?" if (close := near(full, ids)) else "")
            )
    places, hints = placement_of(model), hints_of(model)
    said: dict[int, Any] = {ids[full]: hint for full, hint in hints.items()}
    said |= {ids[full]: of for full, of in given.items()}
    found: dict[int, Layout] = {}
    homeless = []
    for each in held:
        if id(each.value) in found:
            continue
        sbp, where = said.get(id(each.value), B), places.get(each.full.rpartition(".")[0])
        if where is None and not isinstance(sbp, Layout):
            homeless.append(each.full)
            continue
        found[id(each.value)] = _lie(each, sbp, where)
    if homeless:
        raise SbpError(
            f"materialise: {_some(homeless)} {'has' if len(homeless) == 1 else 'have'} no placement\n"
            "  say where the model lives, as in flow.nn.place(model, placement), or give layouts"
        )
    return found


def _lie(each: _Held, sbp: Any, where: Placement | None) -> Layout:
    shape, dtype = tuple(each.value.shape), each.value.dtype
    if isinstance(sbp, Layout):
        if (sbp.shape, sbp.dtype) != (shape, dtype):
            raise SbpError(
                f"materialise: the layout of {each.full} is of another tensor\n  it is {dtype} {shape}\n"
                f"  {sbp!r}\n  make it of this shape and dtype"
            )
        return sbp
    assert where is not None
    try:
        return layout(where, on_all_axes(sbp, where), shape, dtype)
    except SbpflowError as error:
        raise type(error)(f"materialise: {each.full} {shape} as {sbp!r}\n  {error}") from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _agree(model: nn.Module, on: torch.device, placements: Iterable[Placement]) -> None:
    """All ranks together: those of one pipeline stage draw what another keeps."""
    ranks = tuple(sorted({rank for where in placements for rank in where.flat}))
    if ranks:
        everybody = Placement(on.type, ranks, (len(ranks),), None)
        seeds.agree(everybody)
        _same_values(model, everybody, "materialise")


@dataclass
class _Work:
    model: nn.Module
    held: list[_Held]
    lies: dict[int, Layout]
    on: torch.device
    init: Init | None
    made: dict[int, GlobalTensor] = field(default_factory=dict)
    open: list[_Held] = field(default_factory=list)  # left empty by their own module; one around it may fill them

    def run(self) -> None:
        own: dict[nn.Module, list[_Held]] = {}
        for each in self.held:
            own.setdefault(each.module, []).append(each)
            if not each.value.is_meta:
                self.keep(each, each.value)
        around = initialisers(self.model)
        self.refuse_without([each for each in self.held if each.value.is_meta and not around[each.module].any])
        empty = {path for path, module in _children_first(self.model) if any(v.is_meta for v in _values(module))}
        for path, module in _children_first(self.model):
            if path in empty:
                self.initialise(path, around[module], own.get(module, []))
        self.refuse_without([each for each in self.open if id(each.value) not in self.made])

    def initialise(self, path: str, by: Initialisers, own: list[_Held]) -> None:
        """One module: fresh memory for what it holds, filled by its initialisers, and cut."""
        inside = [each for each in self.open if each.full.startswith(f"{path}." if path else "")]
        filled: dict[_Held, Tensor] = {}
        for run in by.own:
            filled = self.fill(own, run) | filled  # what the first wrote stays
            for each in inside:
                if id(each.value) not in self.made and written(each.table[each.name]):
                    self.keep(each, each.table[each.name])
            if len(filled) == len(own) and all(id(each.value) in self.made for each in inside):
                break
        for each in own:
            if each in filled:
                self.keep(each, filled[each])
            elif id(each.value) not in self.made and not self.ask(each):
                if not by.own:
                    self.blank(each)
                self.open.append(each)
        for each in own:
            if id(each.value) in self.made:
                each.put(self.made[id(each.value)])

    def fill(self, own: list[_Held], run: Callable[[], object]) -> dict[_Held, Tensor]:
        fresh = {each: self.blank(each) for each in own}
        run()
        now = {each: each.table[each.name] for each in own}
        return {each: value for each, value in now.items() if value is not fresh[each] or written(value)}

    def blank(self, each: _Held) -> Tensor:
        whole = blank(each.value, self.on)
        each.put(whole)
        return whole

    def ask(self, each: _Held) -> bool:
        """Have the user's function fill what nothing of the module does."""
        if self.init is None:
            return False
        whole = self.blank(each)
        self.init(each.full, whole)
        if not written(whole):
            raise SbpError(
                f"materialise: init={getattr(self.init, '__name__', self.init)} left {each.full} without values\n"
                "  fill the whole tensor in place, as by tensor.zero_()"
            )
        self.keep(each, whole)
        return True

    def keep(self, each: _Held, whole: Tensor) -> None:
        if id(each.value) not in self.made:  # a tied one has the values of the first module that gives it any
            self.made[id(each.value)] = self.cut(each, whole)
        each.put(self.made[id(each.value)])

    def cut(self, each: _Held, whole: Tensor) -> GlobalTensor:
        """Its shards, for now on the kind of device that draws, so that what is drawn later comes from there too."""
        of = self.lies[id(each.value)]
        if tuple(whole.shape) != of.shape or whole.dtype is not of.dtype:
            raise SbpError(
                f"materialise: {each.full} was made as {whole.dtype} {tuple(whole.shape)} by the module that holds it\n"
                f"  it is {of.dtype} {of.shape} on meta; make both alike"
            )
        there = _on(of, Placement(self.on.type, of.placement.flat, of.placement.shape, of.placement.names))
        plain = whole.detach()
        everywhere = whole_everywhere(plain, there.placement)
        shards = box(everywhere._shards, everywhere._layout, there, op="materialise")
        alone = len(shards) == 1 and shards[0].shape == plain.shape and ours(whole)  # nobody else holds this memory
        if not alone:
            shards = tuple(_fresh(shard, plain) for shard in shards)
        return _leaf(each, wrap(shards, there))

    def refuse_without(self, missing: list[_Held]) -> None:
        """An error for tensors to which nothing gives values."""
        if not missing or self.init is not None:
            return
        kind = missing[0].kind
        those = [each.full for each in missing if each.kind == kind]
        what = "has no value on meta" if len(those) == 1 else "have no values on meta"
        fix = "" if kind == "parameter" else ",\n  or build it on the CPU, as by torch.arange(n, device='cpu')"
        raise SbpError(
            f"materialise: {_some(those)} {what}\n"
            f"  {type(missing[0].module).__name__}, which holds the {kind} {those[0]}, does not fill it by "
            "reset_parameters, nor does an _init_weights around it\n"
            f"  add one, or pass a function that fills it: materialise(..., init=lambda name, tensor: ...){fix}"
        )

    def settle(self) -> None:
        """To where the layouts say, and into every place of each tensor."""
        final: dict[int, GlobalTensor] = {}
        for each in self.held:
            key = id(each.value)
            if key not in final:
                final[key] = _settled(each, self.made.pop(key), self.lies[key])
                final[key]._path = each.full
            each.put(final[key])
            _stale[each.value] = each.full, "materialise", "make the optimizer after flow.nn.materialise(module, ...)"


def _values(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _on(of: Layout, where: Placement) -> Layout:
    return Layout(where, of.state, of.shape, of.dtype, (), of.sbp)


def _leaf(each: _Held, made: GlobalTensor) -> GlobalTensor:
    made._made = each.full
    return replace(each.value, made)


def _settled(each: _Held, made: GlobalTensor, of: Layout) -> GlobalTensor:
    if made.placement is of.placement:
        return made
    pairs = zip(made._shards, owned(of.placement), strict=False)
    shards = tuple(shard.detach().to(device_of(of.placement, rank)) for shard, rank in pairs)
    there = _on(of, of.placement)
    return _leaf(each, wrap(shards or (token(there),), there))
