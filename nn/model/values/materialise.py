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

from ....boxing import box
from ....boxing.exchange.execute import token
from ....placement import Placement
from ....placement.errors import SbpError, some_of
from ....placement.world import device as device_of
from ....placement.world import owned
from ....sbp import B, Layout, SbpLike
from ....sbp.layout import memory_order
from ...tensors import seeds
from ...tensors.factories import _fresh, whole_everywhere
from ...tensors.tensor import GlobalTensor, wrap
from ..annotate import hints_of, placement_of
from ..paths import meant_path
from ..replacement import check_replaceable, replace
from ..slots import TensorSlot, joined_path, put, slots, tied
from .initialisers import Initialisers, blank, initialisers, ours, written
from .noted_values import WaitingValue, check_same_waiting, forget_values, read_values, waiting_values
from .same_values import check_same, ranks_of

__all__ = ["make_global", "materialise", "plain_slots"]

Init: TypeAlias = Callable[[str, Tensor], object]
InFiles: TypeAlias = Mapping[int, WaitingValue]  # by the ids of the values that come from there


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
    lies = _lies(model, layouts or {})
    fix = "make the optimizer after flow.nn.materialise(module, ...)"
    make_global({"": model}, lies, torch.device(device), "materialise", fix, init)


def make_global(
    modules: Mapping[str, nn.Module],
    lies: Mapping[int, Layout],
    on: torch.device,
    by: str,
    fix: str,
    init: Init | None = None,
) -> None:
    """Give each plain tensor of some modules the layout for its id, and values drawn `on` a device where it has none.
    After an error the modules are as they were; `by` and `fix` are for optimizers made before."""
    held = {prefix: plain_slots({prefix: root}) for prefix, root in modules.items()}
    every = [slot for some in held.values() for slot in some]
    groups = tied(every)
    files = waiting_values(groups)
    for some in held.values():
        _agree(some, on, {lies[id(slot.value)].placement for slot in some}, files)
    made: dict[int, GlobalTensor] = {}
    try:
        with torch.no_grad(), on:
            for prefix, root in modules.items():
                for slot in held[prefix]:
                    if id(slot.value) in made:  # also in a module before
                        slot.put(made[id(slot.value)])
                own = [slot for slot in held[prefix] if id(slot.value) not in made and id(slot.value) not in files]
                _Work(prefix, root, own, lies, on, init, made, files).run()
            # Last: initialisers find on meta what comes from files, and so leave it alone.
            parts = read_values(groups, files, lies, on.type)
            made |= {key: _leaf(groups[key][0], part) for key, part in parts.items()}
    except BaseException:
        for slot in every:
            slot.put(slot.value)
        raise
    for key, group in groups.items():
        put(group, _settled(group[0], made.pop(key), lies[key]), by, fix)
        forget_values(group)


def plain_slots(modules: Mapping[str, nn.Module]) -> list[TensorSlot]:
    """The slots of what is not global yet, with each module once."""
    found = [slot for slot in slots(modules, once=True) if not isinstance(slot.value, GlobalTensor)]
    for slot in found:
        if is_lazy(slot.value):
            raise SbpError(f"materialise: {slot.full} has no shape yet\n  run the lazy module on a batch first")
        check_replaceable(slot.full, slot.value, "materialise")
    return found


def _children_first(prefix: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                yield from visit(joined_path(path, name), child)
        yield path, module

    return visit(prefix, model)


def _lies(model: nn.Module, given: Mapping[str, Layout | SbpLike]) -> dict[int, Layout]:
    """The layout of every tensor, by its id; a tied one goes by all its names."""
    ids = {slot.full: id(slot.value) for slot in slots({"": model})}
    for full in given:
        if full not in ids:
            raise SbpError(
                f"materialise: no parameter or buffer is called {full!r}\n"
                f"  there are {len(ids)}\n  {meant_path(full, ids)}"
            )
    places, hints = placement_of({"": model}), hints_of({"": model})
    said: dict[int, Any] = {ids[full]: hint for full, hint in hints.items()}
    said |= {ids[full]: of for full, of in given.items()}
    found: dict[int, Layout] = {}
    homeless = []
    for each in plain_slots({"": model}):
        if id(each.value) in found:
            continue
        sbp, where = said.get(id(each.value), B), places.get(each.full.rpartition(".")[0])
        if where is None and not isinstance(sbp, Layout):
            homeless.append(each.full)
            continue
        found[id(each.value)] = _lie(each, sbp, where)
    if homeless:
        raise SbpError(
            f"materialise: {some_of(homeless)} {'has' if len(homeless) == 1 else 'have'} no placement\n"
            "  say where the model lives, as in flow.nn.place(model, placement), or give layouts"
        )
    return found


def _lie(each: TensorSlot, sbp: Any, where: Placement | None) -> Layout:
    shape, dtype = tuple(each.value.shape), each.value.dtype
    if isinstance(sbp, Layout):
        if (sbp.shape, sbp.dtype) != (shape, dtype):
            raise SbpError(
                f"materialise: the layout of {each.full} is of another tensor\n  it is {dtype} {shape}\n"
                f"  {sbp!r}\n  make it of this shape and dtype"
            )
        return sbp
    assert where is not None
    return each.laid(sbp, where, f"materialise: {each.full} {shape} as {sbp!r}\n  ")


def _agree(held: list[TensorSlot], on: torch.device, placements: Iterable[Placement], files: InFiles) -> None:
    """All ranks together: those of one pipeline stage draw what another keeps."""
    everybody = ranks_of(placements, on.type)
    if everybody is None:
        return
    groups = tied(held)
    check_same_waiting({group[0].full: files[key] for key, group in groups.items() if key in files}, everybody)
    own = [group[0].value for key, group in groups.items() if key not in files]
    if any(value.is_meta for value in own):  # which is drawn; what has values needs no seed
        seeds.agree(everybody)
    if own:
        check_same([group[0] for group in groups.values()], everybody, "materialise")


@dataclass
class _Work:
    prefix: str
    model: nn.Module
    held: list[TensorSlot]
    lies: Mapping[int, Layout]
    on: torch.device
    init: Init | None
    made: dict[int, GlobalTensor]
    files: InFiles  # what is read afterwards
    open: list[TensorSlot] = field(default_factory=list)  # left empty by their own module; one around it may fill them

    def run(self) -> None:
        own: dict[nn.Module, list[TensorSlot]] = {}
        for each in self.held:
            own.setdefault(each.module, []).append(each)
            if not each.value.is_meta:
                self.keep(each, each.value)
        around = initialisers(self.model)
        self.refuse_without([each for each in self.held if each.value.is_meta and not around[each.module].any])
        modules = list(_children_first(self.prefix, self.model))
        empty = {path for path, module in modules if any(map(self.is_empty, slots({"": module})))}
        for path, module in modules:
            if path in empty:
                self.initialise(path, around[module], own.get(module, []))
        self.refuse_without([each for each in self.open if id(each.value) not in self.made])

    def is_empty(self, slot: TensorSlot) -> bool:
        return slot.value.is_meta and id(slot.value) not in self.files

    def initialise(self, path: str, by: Initialisers, own: list[TensorSlot]) -> None:
        """One module: fresh memory for what it holds, filled by its initialisers, and cut."""
        inside = [each for each in self.open if each.full.startswith(f"{path}." if path else "")]
        filled: dict[TensorSlot, Tensor] = {}
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

    def fill(self, own: list[TensorSlot], run: Callable[[], object]) -> dict[TensorSlot, Tensor]:
        fresh = {each: self.blank(each) for each in own}
        run()
        now = {each: each.table[each.name] for each in own}
        return {each: value for each, value in now.items() if value is not fresh[each] or written(value)}

    def blank(self, each: TensorSlot) -> Tensor:
        whole = blank(each.value, self.on)
        each.put(whole)
        return whole

    def ask(self, each: TensorSlot) -> bool:
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

    def keep(self, each: TensorSlot, whole: Tensor) -> None:
        if id(each.value) not in self.made:  # a tied one has the values of the first module that gives it any
            self.made[id(each.value)] = self.cut(each, whole)
        each.put(self.made[id(each.value)])

    def cut(self, each: TensorSlot, whole: Tensor) -> GlobalTensor:
        """Its shards, for now on the kind of device that draws, so that what is drawn later comes from there too."""
        of = self.lies[id(each.value)]
        if tuple(whole.shape) != of.shape or whole.dtype is not of.dtype:
            raise SbpError(
                f"materialise: {each.full} was made as {whole.dtype} {tuple(whole.shape)} by the module that holds it\n"
                f"  it is {of.dtype} {of.shape} on meta; make both alike"
            )
        there = _on(of, Placement(self.on.type, of.placement.flat, of.placement.shape, of.placement.names))
        plain = whole.detach()
        there = there.in_order(memory_order(plain))
        everywhere = whole_everywhere(plain, there.placement)
        shards = box(everywhere._shards, everywhere._layout, there, op="materialise")
        alone = len(shards) == 1 and shards[0].shape == plain.shape and ours(whole)  # nobody else holds this memory
        if not alone:
            shards = tuple(_fresh(shard, plain, there) for shard in shards)
        return _leaf(each, wrap(shards, there))

    def refuse_without(self, missing: list[TensorSlot]) -> None:
        """An error for tensors to which nothing gives values."""
        if not missing or self.init is not None:
            return
        kind = missing[0].kind
        those = [each.full for each in missing if each.kind == kind]
        what = "has no value on meta" if len(those) == 1 else "have no values on meta"
        fix = "" if kind == "parameter" else ",\n  or build it on the CPU, as by torch.arange(n, device='cpu')"
        raise SbpError(
            f"materialise: {some_of(those)} {what}\n"
            f"  {type(missing[0].module).__name__}, which holds the {kind} {those[0]}, does not fill it by "
            "reset_parameters, nor does an _init_weights around it\n"
            f"  add one, or pass a function that fills it: materialise(..., init=lambda name, tensor: ...){fix}"
        )


def _on(of: Layout, where: Placement) -> Layout:
    return Layout(where, of.state, of.shape, of.dtype, (), of.sbp, () if of.gaps else of.order)


def _leaf(each: TensorSlot, made: GlobalTensor) -> GlobalTensor:
    made._made = each.full
    return replace(each.value, made)


def _settled(each: TensorSlot, made: GlobalTensor, of: Layout) -> GlobalTensor:
    if made.placement is of.placement:
        return made
    pairs = zip(made._shards, owned(of.placement), strict=False)
    shards = tuple(shard.detach().to(device_of(of.placement, rank)) for shard, rank in pairs)
    there = _on(of, of.placement)
    return _leaf(each, wrap(shards or (token(there),), there))
