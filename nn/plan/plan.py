"""Plans: one text beside a model that says how it runs; read, checked without a device, printed back exactly.

plan = flow.Plan.load("gpt.plan")
print(plan.check(model, batch, cluster="h100x8"))
step = flow.compile(model, loss_fn, optimizer, plan=plan)
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import nn
from torch.optim import Optimizer

from ...placement import Cluster
from ...placement.errors import ArgumentError, SbpError
from ..graph.compiler.backends import Backend
from .check import Checked, Loss, check
from .language.lines import Line
from .language.plan_text import PlanText
from .language.read import read
from .taken import taken

__all__ = ["Plan", "StepPlan", "as_plan"]


class Plan(PlanText):
    """A plan as text, with its statements as values.

    >>> plan = Plan.read("grid (data=2, tensor=4)  # two by four")
    >>> print(plan.statements[0])
    grid (data=2, tensor=4)
    """

    def check(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss_fn: Loss | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        cluster: Cluster | str | Path | None = None,
        ranks: int | None = None,
        backend: Backend = "auto",
    ) -> Checked:
        """The step that this plan gives, without a device: seconds, memory, moves, and `expect` lines; one that fails
        is an error.

        The model may be on meta, and stays as it is; so may the batch, a tensor, several, or named ones in a dict.
        Without a loss function it is the model's own, without an optimizer AdamW. `ranks` are those of which the grid
        has what is left. `backend` is as in `flow.compile`: "code" runs, and prices, op by op, which "auto" does on a
        CPU alone.
        """
        return check(
            self, model, batch, loss_fn=loss_fn, optimizer=optimizer, cluster=cluster, ranks=ranks, backend=backend
        )

    @classmethod
    def taken(cls, model: nn.Module, over: str, what: str = "tp_plan") -> Self:
        """The lines that `take tp_plan over AXIS` stands for, of a model of transformers."""
        return cls.read("\n".join(taken(model, over, what)))


class StepPlan(Plan):
    """The plan of a step, whose text is made once somebody reads it."""

    say: Callable[[], str]

    @classmethod
    def of_step(cls, say: Callable[[], str]) -> "StepPlan":
        made = object.__new__(cls)
        made.__dict__.update(name="", say=say)
        return made

    @cached_property
    def text(self) -> str:
        return self.say()

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        return read(self.text, self.name)

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise ArgumentError(
                "step.plan is the plan that runs, and no method\n  a plan for arguments: step.plan_for(*arguments)"
            )


def as_plan(given: PlanText | str | Path | None) -> PlanText | None:
    """A plan that was read, is a text, or lies in a file, which a text of one line may name."""
    if given is None or isinstance(given, PlanText):
        return given
    if isinstance(given, Path) or (isinstance(given, str) and "\n" not in given and given.endswith(".plan")):
        return Plan.load(given)
    if isinstance(given, str):
        return Plan.read(given)
    raise SbpError(
        f"plan={given!r}\n  give it a flow.Plan, a text such as 'grid (data=2)', or the path of a file that has one"
    )
