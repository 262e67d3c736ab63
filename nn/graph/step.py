"""A step for one shape of arguments: captured and planned when it is made, compiled when it first runs.

Planning looks at modules and changes nothing: only the first run makes parameters global, with values where they have
none. Until then what was planned is a plan, which `stands` as long as nothing it depends on has changed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...actors.schedules.pipeline import Costs
from ...boxing.graph.buckets import bucketed
from ...boxing.graph.move_table import moves_of
from ...boxing.graph.physical import Physical, Var
from ...boxing.graph.picture.draw import draw, svg
from ...boxing.graph.report.facts import Held
from ...boxing.graph.report.report import Report
from ...boxing.graph.text.text import fingerprint, to_text
from ...boxing.picture.draw import written
from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import device, owned
from ...sbp import Layout
from ...sbp.call import mapped
from ...sbp.logical import Logical
from ..model.balance import settle
from ..tensors.agreement import same, told
from ..tensors.tensor import GlobalTensor, wrap
from .capture.arguments import cutter, flat, input_titles, tensors_by_path
from .capture.trace import trace
from .choose.choose import Decided, decide
from .choose.parameters import default_placement, globalised, named_values, pins_of, placed, reading, said_of
from .choose.stage_balance import Balance, even_stages, paths_of
from .compiler.generated_calls import trimmed
from .explain import report
from .memory.account import with_states
from .memory.liveness import RankMemory
from .optimizer.adopt import Trained, adopt, clip, refuse_closures, states_of
from .optimizer.on_shards import step_on_shards
from .options import Options
from .passes import Dump, stage_text
from .run.costs import layer_costs
from .run.program import Program

__all__ = ["Step"]


class Step:
    """A step for arguments of one kind."""

    many = 1  # micro-batches
    in_micro_batches = False  # as actors do; every rank then takes arguments from its caller, and not from another

    def __init__(
        self,
        build: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        options: Options,
        names: Sequence[str] = (),
    ) -> None:
        self.modules, self.optimizers, self.options = dict(modules), list(optimizers), options
        self.name, self.backend = str(options.name), options.backend
        self.room = options.memory  # for what is chosen: the limit, or less where more is held than a plan counts
        self.norm: Tensor | None = None  # of the gradients, before the last step clipped them
        self.rest = default_placement(modules, options.placement)
        refuse_closures(optimizers)
        _refuse_history(tensors_by_path(args, kwargs))
        self.dump = Dump(self.name)
        self.kept: dict[str, Layout] = {}  # how parameters and buffers lie, once that is decided
        self.balance: Balance | None = None  # of the stages of pipelines, once a step was captured
        logical = self.captured(build, args, kwargs)
        self.trains, self.rebuild = bool(logical.losses), logical.rebuild
        if optimizers and not self.trains and torch.is_grad_enabled():
            raise SbpError(
                f"{self.name} has an optimizer, and build(...) calls no backward(): nothing would be trained\n"
                "  call loss.backward() in it, or run the graph under torch.no_grad()"
            )
        self.said = said_of(modules)
        self.titles = input_titles(tensors_by_path(args, kwargs), names)
        self.choose(logical, args, kwargs)
        self.ready = False

    def choose(self, logical: Logical, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Decide, and take what was decided as what runs."""
        self.kept = {}
        self.decided: Decided = self.decide(logical, args, kwargs)
        self.graph: Physical = replace(bucketed(self.decided.graph), called=self.titles)
        self.dump("physical", self.text)
        self.kept = {s.value.name: s.value.layout for s in self.graph.sources if s.kind in ("parameter", "buffer")}

    def captured(self, build: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Logical:
        """The captured computation of `build` on such arguments, as layers were placed."""
        owner = getattr(build, "__self__", None)
        with reading(nn.Module, *([] if owner is None else [type(owner)])) as self.reads:
            given, inputs = flat(build, args, kwargs), tensors_by_path(args, kwargs)
            try:
                device = self.rest.type if self.rest else "cpu"
                logical, self.constants = trace(
                    given,
                    (),
                    inputs,
                    self.modules,
                    device=device,
                    placement=self.rest,
                    samples_apart=self.in_micro_batches,
                )
            except RuntimeError as error:
                if not torch.is_grad_enabled():
                    error.add_note(f"{self.name} was called under torch.no_grad(), where build cannot call backward()")
                raise
        self.reads.settle([owner, *(part for module in self.modules.values() for part in module.modules())])
        if self.balance is None:
            self.balance = even_stages(logical, self.modules, self.many)
        self.dump("captured", lambda: str(logical))
        homes = {name: of.placement for name, of in self.kept.items()}
        known = placed(logical, self.modules, homes, self.balance.moved)
        self.dump("placed", lambda: str(known))
        return known

    def decide(
        self, logical: Logical, args: Sequence[Any], kwargs: Mapping[str, Any], rest: Placement | None = None
    ) -> Decided:
        """The signatures, and all moves."""
        inputs = tensors_by_path(args, kwargs)
        decided = decide(
            logical,
            rest or self.rest,
            pins=lambda homes: pins_of(self.modules, inputs, homes) | {n: of.state for n, of in self.kept.items()},
            states=states_of(self.optimizers),
            limit=self.room,
            regather=self.backend != "autograd",
            name=self.name,
            arguments_everywhere=self.in_micro_batches,
        )
        self.dump.decided(decided)
        return decided

    @cached_property
    def program(self) -> Any:
        """The program that runs."""
        return Program(self.graph, backend=self.backend)

    def stands(self) -> bool:
        """Whether the first run would do what was planned: what is said of modules, and of them global, is the same."""
        if self.ready:
            return True
        values = named_values(self.modules)
        return self.said == said_of(self.modules) and all(
            name in values and _fits(values[name], of) for name, of in self.kept.items()
        )

    def prepare(self) -> None:
        """All that the first run does before it can run; when that fails, modules stay what they were."""
        if self.ready:
            return
        for where in dict.fromkeys(value.layout.placement for value in self.graph.values.values()):
            for rank in owned(where):
                device(where, rank)  # there has to be one
        self._agree()
        self.program.prepare()
        self._dump_program()
        self._adopt(self.rest)
        self.ready = True

    def _dump_program(self) -> None:
        program: Program = self.program
        self.dump("segments", lambda: "\n".join(map(stage_text, program.stages)))
        self.dump("order", lambda: str(program.schedule))
        self.dump("source", lambda: program.text)

    def _agree(self) -> None:
        """All ranks must have made the same plan, or they would wait for each other for ever."""
        where = self.graph.sources[0].value.layout.placement if self.graph.sources else None
        rows = told([fingerprint(self.graph)], where, "plan") if where is not None else None
        if rows and len({row[0] for row in rows}) > 1:
            raise SbpError(
                f"ranks of {where!r} made different plans of {self.graph.name}\n"
                "  build must do the same on every rank: look for what depends on the rank, as its number or its data"
            )

    @cached_property
    def _ranks(self) -> Placement:
        """All ranks of the step, in a line."""
        homes = [value.layout.placement for value in self.graph.values.values()]
        ranks = sorted({rank for home in homes for rank in home.flat})
        return Placement(homes[0].type, tuple(ranks), (len(ranks),), None)

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of the arguments by path; plain ones must be the same on every rank."""
        given = tensors_by_path(args, kwargs)
        plain = {path: x for path, x in given.items() if type(x) is not GlobalTensor and x.layout is torch.strided}
        same({path: x for path, x in plain.items() if not x.is_meta}, self._ranks, f"the step {self.name}")
        return given

    def _adopt(self, rest: Placement | None) -> None:
        """The model's values become those of the graph; optimizers get them too."""
        sources = {s.value.name: s for s in self.graph.sources}
        others = rest or next(value.layout.placement for value in self.graph.values.values())
        self.changed = globalised(self.modules, self.kept, others)
        settle(self.balance.moved if self.balance else {})
        values = named_values(self.modules)
        self.held: dict[str, GlobalTensor] = {name: values[name] for name in self.kept}  # type: ignore[misc]
        self.trained = {
            name: Trained(value, sources[name].home)
            for name, value in self.held.items()
            if self.trains and value.requires_grad
        }
        self.known = {id(t.parameter): t for t in self.trained.values()}
        adopt(self.optimizers, self.known, self.changed)
        self.changed = {id(value): value for value in self.changed.values()}  # what was before may be gone by then
        self.homes = {name: s.home for name, s in sources.items() if s.kind == "input"}
        self.cut = {name: cutter(s.value.layout) for name, s in sources.items() if s.kind in ("input", "constant")}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One step on these arguments."""
        self.prepare()
        given = self._given(args, kwargs)
        shards = {name: tuple([s.detach() for s in value._shards]) for name, value in self.held.items()}
        for name, cut in self.cut.items():
            shards[name] = cut(given[name] if name in given else self.constants[name]())
        with torch.no_grad():
            done = self.program(shards)
            for buffer, name in self.graph.writes.items():
                for mine, new in zip(self.held[buffer]._shards, done.values[name], strict=True):
                    mine.copy_(new)
        if self.trains:
            self._learn(done.grads, given)
        return self._result(done.values)

    def _learn(self, grads: Mapping[str, tuple[Tensor, ...]], given: Mapping[str, Tensor]) -> None:
        """Gradients to the parameters; with optimizers a step of each, after which the gradients are gone."""
        if self.optimizers:
            adopt(self.optimizers, self.known, self.changed)
        mine = {id(self.trained[name].master): shards for name, shards in grads.items() if name in self.trained}
        whole = self.options.clip_grad_norm is not None or self._hooked()
        steps = [o for o in self.optimizers if whole or not step_on_shards(o, mine)]
        if steps or not self.optimizers:
            for each in self.trained.values():
                if id(each.master) in mine:
                    each.give(mine[id(each.master)], keep=not self.optimizers)
        for name, shards in grads.items():
            if name not in self.trained:
                self._leave(given[name], shards, self.homes[name])
        if self.options.clip_grad_norm is not None and steps:
            self.norm = clip(self.trained.values(), self.options.clip_grad_norm)
        for optimizer in steps:
            optimizer.step()
        for optimizer in self.optimizers if steps else ():
            optimizer.zero_grad(set_to_none=True)

    def _hooked(self) -> bool:
        """Whether a parameter has hooks, so that gradients have to go by it."""
        return any(each.parameter._hooks is not None for each in self.trained.values())

    @staticmethod
    def _leave(x: Tensor, shards: tuple[Tensor, ...], home: Layout) -> None:
        """The gradient of an argument that wants one."""
        new = wrap(shards, home)
        grad = new.to_global(sbp=x.sbp) if isinstance(x, GlobalTensor) else new.full_tensor().to(x.device)
        x.grad = grad if x.grad is None else x.grad + grad

    def _result(self, values: Mapping[str, tuple[Tensor, ...]]) -> Any:
        def put(var: Var) -> GlobalTensor:
            return wrap(trimmed(values[var.name]), self.graph.layout(var.name))

        return self.rebuild(mapped(self.graph.result, Var, put))

    def text(self) -> str:
        """The physical graph as text."""
        return to_text(self.graph)

    def draw(self, path: str | Path, *, depth: int | None = None, focus: str | None = None, full: bool = False) -> Path:
        """The physical graph as a picture."""
        return draw(self.graph, path, depth, focus, full=full)

    def draw_map(self, path: str | Path) -> Path:
        """The model on one page: modules down, axes across, and memory by kind."""
        return written(self.explain().map(), path)

    def draw_actors(self, path: str | Path) -> Path:
        """The actors that run it as a picture, where it was made to be run by some."""
        raise SbpError(
            f"{self.name} runs as one function, without actors\n"
            "  make it with micro_batches= or schedule=, as in schedule='1f1b', to have it run by actors"
        )

    def svg(self) -> str | None:
        """The picture as text, where something can draw it."""
        return svg(self.graph)

    def timeline(self) -> Any:
        """The timeline of the last run, where it was run by actors."""
        raise SbpError(
            f"{self.name} runs as one function, which has no timeline\n"
            "  make it with micro_batches= or schedule=, as in schedule='1f1b', to have it run by actors"
        )

    def costs(self) -> tuple[Costs, ...]:
        """Costs of the chunks of a pipeline, where it was made to be one."""
        raise SbpError(
            f"{self.name} runs as one function, without chunks\n"
            "  make it with micro_batches= or schedule=, as in schedule='1f1b', to have it cut into some"
        )

    def layer_costs(self, layers: Iterable[nn.Module]) -> list[float]:
        """Seconds that each of some modules is predicted to take."""
        paths = paths_of(self.modules)
        listed = list(layers)
        strange = next((part for part in listed if id(part) not in paths), None)
        if strange is not None:
            raise SbpError(
                f"layer_costs: {self.name} has no such module: {type(strange).__name__}\n"
                "  give it layers of the model that it was made with"
            )
        return layer_costs(self.decided, [paths[id(part)] for part in listed])

    def explain(self) -> Report:
        """The plan and its reasons."""
        again = self.program.again
        ranks, estimates = self.held_by_rank()
        made = report(self.graph, self.decided, ranks, estimates, self.options.memory, again)
        return replace(made, cut=self.balance.said if self.balance else "")

    def homes_of_trained(self) -> dict[str, Layout]:
        """Where the gradient of each parameter ends, by its name, if the step trains."""
        learns = {s.name for s in self.decided.logical.sources if s.requires_grad and s.kind != "input"}
        return {s.value.name: s.home for s in self.graph.sources if self.trains and s.value.name in learns}

    def held_by_rank(self) -> tuple[dict[int, Held], tuple[str, ...]]:
        """The account of memory, and why the inside of some segments is estimated in it."""
        live = self.memory()
        estimates = max((held.estimates for held in live.values()), key=len, default=())
        return with_states(live, self.homes_of_trained().values(), states_of(self.optimizers)), estimates

    def memory(self) -> dict[int, RankMemory]:
        """The bytes that a step takes at its peak on every rank."""
        found: dict[int, RankMemory] = self.program.memory()
        return found

    def __repr__(self) -> str:
        sent = sum(row.total * row.count for row in moves_of(self.graph, self.program.again))
        return f"{self.graph.name}: {len(self.graph.steps)} steps, {sent} bytes sent in all"


def _fits(value: Tensor, of: Layout) -> bool:
    """Whether a parameter or buffer is what was planned, or can be made so."""
    same = tuple(value.shape) == of.shape and value.dtype is of.dtype
    if not isinstance(value, GlobalTensor):
        return same
    return same and value.placement is of.placement and value._layout.state == of.state


def _refuse_history(inputs: Mapping[str, Tensor]) -> None:
    """Gradients would end at the graph, and what comes before it would not be trained."""
    for path, x in inputs.items():
        if x.requires_grad and not x.is_leaf and torch.is_grad_enabled():
            raise SbpError(
                f"the argument {path} {tuple(x.shape)} was computed from something that requires grad\n"
                "  no gradient would go back from the graph to there\n"
                "  compute it inside of the graph, or pass x.detach()"
            )
