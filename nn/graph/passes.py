"""The passes of a graph, from a model to a step that runs: one line each, in their order.

With SBPFLOW_DUMP=dir in the environment each step writes what its passes give, a file each, as text.
"""

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ...boxing.graph.physical import Box
from ...placement.world import world
from .choose.choose import Decided
from .explain import said
from .lower.segments import Draw, Stage

__all__ = ["PASSES", "Dump", "Pass", "stage_text"]


class Pass(NamedTuple):
    """A pass by name, the function that makes it, and what it gives."""

    name: str
    by: str
    gives: str


PASSES = (
    Pass("captured", "nn.graph.capture.trace.trace", "every ATen call of a step, none of them in place"),
    Pass("placed", "nn.graph.choose.parameters.placed", "the same with a placement for what was annotated"),
    Pass("microbatch", "nn.graph.microbatch.rewrite.separated", "in pipelines: the step of one micro-batch"),
    Pass("decomposed", "nn.graph.choose.decompose.expand", "ops taken apart where parts may lie better"),
    Pass("chosen", "sbp.joint.solver.solve.solve", "a signature for each source and op, and what all of them cost"),
    Pass("physical", "boxing.graph.insert.insert", "the moves between them, gradients in buckets"),
    Pass("segments", "nn.graph.lower.segments.segments", "the runs of ops between which nothing moves"),
    Pass("order", "nn.graph.lower.order.schedule", "forward and backward as one list, or tasks of a pipeline"),
    Pass("source", "nn.graph.compiler.codegen.function", "one Python function, or the network of a pipeline's actors"),
)


_steps = count(1)


class Dump:
    """The files of one step: `dir/rank0/Net-1/05-chosen.txt` and so on; none where nobody asked for them."""

    def __init__(self, name: str) -> None:
        said = os.environ.get("SBPFLOW_DUMP")
        self.folder = Path(said) / f"rank{world().rank or 0}" / f"{name}-{next(_steps)}" if said else None

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Write what a pass gave; of several, as for micro-batches of other sizes, one behind the other."""
        number = next(at for at, each in enumerate(PASSES, 1) if each.name == name)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{number:02}-{name}.txt").open("a") as file:
                file.write(f"{text()}\n")

    def decided(self, decided: Decided) -> None:
        """Write what choosing went through."""
        self("decomposed", lambda: str(decided.logical))
        self("chosen", lambda: "\n".join(_choices(decided)))


def _choices(decided: Decided) -> Iterator[str]:
    solution, logical, names = decided.solution, decided.logical, decided.names
    yield f"{solution.cost:.6g} s by {solution.method}; no plan is below {solution.bound:.6g} s"
    for node, k in zip(decided.formulated.nodes, solution.choice, strict=True):
        if node.kind == "source":
            number, what = node.index, logical.sources[node.index].name
        elif node.kind == "op":
            (number, *_), what = logical.ops[node.index].numbers, str(logical.ops[node.index].op)
        else:
            number, what = node.index, node.kind
        axes = decided.graph.layout(names[number]).placement.ndim
        taken = said(node.candidates[k], axes)
        yield f"%{number} {what}: {taken}, one of {len(node.candidates)}, {float(node.cost[k]):.3g} s"


def stage_text(stage: Stage) -> str:
    """A segment with its ops, a move, or a draw."""
    if isinstance(stage, Box):
        return f"box {stage.source} -> {stage.output.name}: {stage.output.layout}"
    if isinstance(stage, Draw):
        return f"draw {stage.op.op} -> {', '.join(stage.outputs)}"
    head = f"segment on {stage.placement}: {', '.join(stage.inputs)} -> {', '.join(stage.outputs)}"
    return "\n".join(
        [head, *(f"  {op.op}({', '.join(op.inputs)}) -> {', '.join(y.name for y in op.outputs)}" for op in stage.ops)]
    )
