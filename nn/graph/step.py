"""A step for one shape of arguments: captured, planned and compiled when it is made; run any number of times."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...boxing.graph.buckets import bucketed
from ...boxing.graph.draw import draw, svg
from ...boxing.graph.physical import Graph, Var
from ...boxing.graph.report import Report
from ...boxing.graph.text import fingerprint, to_text
from ...placement import Placement
from ...placement.errors import SbpError
from ..agree import told
from ..tensor import GlobalTensor, wrap
from .backend import Backend
from .decide import Decided, decide
from .inputs import cutter, tensors_by_path
from .model import default_placement, globalised, named_values, pins_of, placed
from .optimizers import Trained, adopt, states_of
from .program import Program
from .reporting import report
from .trace import trace

__all__ = ["Step"]


class Step:
    """What a graph does for arguments of one kind."""

    def __init__(
        self,
        build: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        placement: Placement | None,
        backend: Backend,
        memory: float | None,
        clip: float | None,
        name: str,
    ) -> None:
        self.modules, self.optimizers, self.clip, self.limit = dict(modules), list(optimizers), clip, memory
        inputs = tensors_by_path(args, kwargs)
        rest = default_placement(modules, placement)
        logical, self.constants = trace(build, args, kwargs, modules, device=rest.type if rest else "cpu")
        logical = placed(logical, modules)
        self.trains = bool(logical.losses)
        self.decided: Decided = decide(
            logical,
            rest,
            pins=lambda homes: pins_of(modules, inputs, homes),
            states=states_of(optimizers),
            limit=memory,
            name=name,
        )
        self.graph: Graph = bucketed(self.decided.graph)
        self._agree()
        self._adopt(rest)
        self.program = Program(self.graph, backend=backend)

    def _agree(self) -> None:
        """All ranks must have made the same plan, or they would wait for each other for ever."""
        where = self.graph.sources[0].value.layout.placement if self.graph.sources else None
        rows = told([fingerprint(self.graph)], where, "plan") if where is not None else None
        if rows and len({row[0] for row in rows}) > 1:
            raise SbpError(
                f"ranks of {where!r} made different plans of {self.graph.name}\n"
                "  build must do the same on every rank: look for what depends on the rank, as its number or its data"
            )

    def _adopt(self, rest: Placement | None) -> None:
        """The model's values become those of the graph; optimizers get them too."""
        sources = {s.value.name: s for s in self.graph.sources}
        held = {name: s.value.layout for name, s in sources.items() if s.kind in ("parameter", "buffer")}
        others = rest or next(iter(s.value.layout.placement for s in sources.values()))
        changed = globalised(self.modules, held, others)
        values = named_values(self.modules)
        self.held = {name: values[name] for name in held}
        self.trained = {
            name: Trained(value, sources[name].home)
            for name, value in self.held.items()
            if isinstance(value, GlobalTensor) and value.requires_grad and self.trains
        }
        by_id = {id(t.parameter): t for t in self.trained.values()}
        known = {old: by_id[id(new)] for old, new in changed.items() if id(new) in by_id}
        spare = {old: Trained(new, new._layout.with_state(new._layout.state)) for old, new in changed.items()
                 if isinstance(new, GlobalTensor) and id(new) not in by_id}  # fmt: skip
        adopt(self.optimizers, {**spare, **known})
        self.cut = {name: cutter(s.value.layout) for name, s in sources.items() if s.kind in ("input", "constant")}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One step on these arguments."""
        given = tensors_by_path(args, kwargs)
        shards: dict[str, tuple[Tensor, ...]] = {name: value._shards for name, value in self.held.items()}  # type: ignore[attr-defined]
        for name, cut in self.cut.items():
            shards[name] = cut(given[name] if name in given else self.constants[name]())
        with torch.no_grad():
            done = self.program({name: tuple(s.detach() for s in held) for name, held in shards.items()})
            for buffer, name in self.graph.writes.items():
                self._write(buffer, done.values[name])
        if self.trains:
            self._learn(done.grads)
        return self._result(done.values)

    def _write(self, buffer: str, shards: tuple[Tensor, ...]) -> None:
        held = self.held[buffer]
        for mine, new in zip(held._shards, shards, strict=True):  # type: ignore[attr-defined]
            mine.copy_(new)

    def _learn(self, grads: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Gradients to the parameters; with optimizers a step of each, after which the gradients are gone."""
        for name, shards in grads.items():
            if name in self.trained:
                self.trained[name].give(shards, add=not self.optimizers)
        if not self.optimizers:
            return
        if self.clip is not None:
            nn.utils.clip_grad_norm_([t.master for t in self.trained.values()], self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for each in self.trained.values():
            each.settle()

    def _result(self, values: Mapping[str, tuple[Tensor, ...]]) -> Any:
        def put(value: Any) -> Any:
            if isinstance(value, Var):
                return wrap(values[value.name], self.graph.layout(value.name))
            if isinstance(value, list | tuple):
                return type(value)([put(part) for part in value])
            if isinstance(value, dict):
                return {name: put(part) for name, part in value.items()}
            return value

        return put(self.graph.result)

    def text(self) -> str:
        """The physical graph as text."""
        return to_text(self.graph)

    def draw(self, path: str | Path, *, depth: int | None = None, focus: str | None = None) -> Path:
        """The physical graph as a picture."""
        return draw(self.graph, path, depth, focus)

    def svg(self) -> str | None:
        """The picture as text, where something can draw it."""
        return svg(self.graph)

    def explain(self) -> Report:
        """What was chosen and why."""
        kept = states_of(self.optimizers)
        return report(
            self.graph, self.decided, self.program.memory(), self.trained, kept, self.limit, self.program.again
        )

    def __repr__(self) -> str:
        sent = sum(back.plan.total for back in self.graph.backs) + sum(
            self.graph.plan(b).total for b in self.graph.boxes
        )
        return f"{self.graph.name}: {len(self.graph.steps)} steps, {sent} bytes sent in all"
