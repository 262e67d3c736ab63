"""Options: what a graph is to be made with, checked once, as `Graph` and `compile` take it by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from ...actors.schedules.chunk_ends import Folding
from ...actors.schedules.published import published
from ...actors.schedules.schedule import Schedule
from ...boxing.encoding import MoveEncoder
from ...placement import Placement
from ...placement.errors import PlacementError, SbpError, did_you_mean
from ...sbp import Partial
from ...sbp.text import PartSbp, Pin
from .compiler.backends import Backend

__all__ = ["DrawScope", "GivenOptions", "OptionError", "Options", "schedule_of"]

DrawScope: TypeAlias = Literal["batch", "micro_batch"]


class OptionError(SbpError):
    """An option that cannot be beside the others, by its name; a plan shows the line that says it."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class GivenOptions(TypedDict, total=False):
    """The options by name, for type checkers to read a `**options`."""

    placement: Placement | None
    backend: Backend
    memory: float | None
    clip_grad_norm: float | None
    micro_batches: int
    schedule: str | Schedule | None
    slices: int | Sequence[int] | None
    inputs: Mapping[str, PartSbp] | None
    loss_scale: float | None
    skip_nonfinite: bool
    leave_gradients: bool
    compress: Mapping[str, MoveEncoder] | None
    overlap: bool | Folding
    post_validation: bool
    draws: DrawScope
    cuda_graph: bool
    hold: Sequence[str]
    name: str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a graph; making them refuses what cannot be.

    placement         where layers live that nobody placed
    backend           by which segments are run
    memory            bytes of a rank within which everything has to fit
    clip_grad_norm    the norm to which gradients are clipped before optimizers step
    micro_batches     into how many parts a batch is cut; these are run by actors, under a `schedule`
    slices            into how many parts each sequence is cut, or how long these are
    inputs            how arguments lie, by their names; in micro-batches, those of each
    loss_scale        the factor of losses whose gradients are fp16; one that works is found where none is said
    skip_nonfinite    whether a step changes nothing if its loss or a gradient is not finite on some rank
    leave_gradients   whether gradients are left on parameters, for whoever steps the optimizer, such as a trainer
    compress          encoders of gradients by patterns of parameters, besides what `flow.nn.compress` says
    overlap           whether each chunk's gradients go home beside the work of others, or how
    post_validation   whether each chunk's optimizer steps when its gradients are home; where those of other chunks then
                      say otherwise, that is made good
    draws             whose random numbers micro-batches have: pieces of the batch's, which are those of one device and
                      are held until the step ends, or each its own, which take no memory
    cuda_graph        whether the step is recorded as a graph of its card, and replayed from its third call on
    hold              paths of modules in which flows that nobody names follow from those that are, and are not chosen
    """

    placement: Placement | None = None
    backend: Backend = "auto"
    memory: float | None = None
    clip_grad_norm: float | None = None
    micro_batches: int = 1
    schedule: str | Schedule | None = None
    slices: int | Sequence[int] | None = None
    inputs: Mapping[str, PartSbp] | None = None
    loss_scale: float | None = None
    skip_nonfinite: bool = False
    leave_gradients: bool = False
    compress: Mapping[str, MoveEncoder] | None = None
    overlap: bool | Folding = False
    post_validation: bool = False
    draws: DrawScope = "batch"
    cuda_graph: bool = False
    hold: Sequence[str] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        if not (self.placement is None or isinstance(self.placement, Placement)):
            raise PlacementError(f"placement={self.placement!r}\n  make one, as in flow.placement('cpu:[0-3]')")
        _check_positive("memory", self.memory, "bytes a rank, as in 80e9")
        _check_positive("clip_grad_norm", self.clip_grad_norm, "a norm")
        _check_positive("loss_scale", self.loss_scale, "a factor, as in 2.0**16")
        for name in ("skip_nonfinite", "leave_gradients", "cuda_graph"):
            if type(getattr(self, name)) is not bool:
                raise SbpError(f"{name}={getattr(self, name)!r}\n  say True or False")
        if not (self.compress is None or isinstance(self.compress, Mapping)):
            raise SbpError(
                f"compress={self.compress!r}\n"
                "  give it encoders by pattern, as in compress={'*': flow.encoders.sign()}"
            )
        if not isinstance(self.overlap, bool | Folding):
            raise SbpError(f"overlap={self.overlap!r}\n  say True or False, or how, as in flow.actors.Folding(parts=2)")
        if type(self.post_validation) is not bool:
            raise SbpError(f"post_validation={self.post_validation!r}\n  say True or False")
        if self.draws not in get_args(DrawScope):
            raise SbpError(f"draws={self.draws!r}\n  there are {', '.join(map(repr, get_args(DrawScope)))}")
        if self.draws != "batch" and not self.piped:
            raise OptionError(
                "draws",
                "whose numbers micro-batches draw is said of a step that has none\n"
                "  say micro_batches=, or `16 micro-batches` in a plan, too; or leave it out",
            )
        if self.backend not in get_args(Backend):
            raise SbpError(f"backend={self.backend!r}\n  there are {', '.join(map(repr, get_args(Backend)))}")
        if type(self.micro_batches) is not int or self.micro_batches < 1:
            raise SbpError(f"micro_batches={self.micro_batches!r}\n  give it how many to cut a batch into, as in 8")
        if self.piped:
            _ = self.policy
        if self.cuda_graph and self.piped:
            raise SbpError(
                "cuda_graph=True is said of a step in micro-batches, whose actors the host runs\n"
                "  leave cuda_graph= out; or micro_batches=, schedule= and slices="
            )
        if isinstance(self.hold, str) or not all(isinstance(path, str) for path in self.hold):
            raise SbpError(
                f"hold={self.hold!r}\n  give it paths of modules, as in hold=['layers']; [''] is the whole step"
            )
        self._check_ends()
        self._check_left()
        _ = self.flows

    def _check_ends(self) -> None:
        """Refuse ends of chunks where there are none."""
        for name, said in (("overlap", self.overlap), ("post_validation", self.post_validation)):
            if said is not False and not self.piped:
                raise SbpError(
                    f"{name}= is said of a step that has no micro-batches\n  say micro_batches=, or leave it out"
                )
            if said is not False and not self.policy.synchronous:
                raise SbpError(
                    f"{name}= with schedule={self.policy.name!r}, under which weights change while a step goes on\n"
                    f"  leave {name}= out, or take a schedule with a flush, such as '1f1b'"
                )

    def _check_left(self) -> None:
        """Refuse what only a step that updates could do, where somebody else does that."""
        if not self.leave_gradients:
            return
        asked = {
            "clip_grad_norm": "clip them before the optimizer steps, as by torch.nn.utils.clip_grad_norm_",
            "skip_nonfinite": "look at them before the optimizer steps",
            "loss_scale": "train in bf16, which needs none",
            "post_validation": "leave it out",
        }
        for name, fix in asked.items():
            if getattr(self, name) not in (None, False):
                raise SbpError(
                    f"{name}= is said of a step with leave_gradients=True, whose gradients others step by\n  {fix}"
                )
        if self.piped and not self.policy.synchronous:
            raise SbpError(
                f"leave_gradients=True with schedule={self.policy.name!r}, which updates weights while a step goes on\n"
                "  take a schedule with a flush, such as '1f1b'"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str) -> "Options":
        """Options by name; `name` is the graph's where nothing else is said."""
        name = given.get("name") or name
        known = [f"{field.name}=" for field in fields(cls)]
        for strange in [each for each in given if f"{each}=" not in known]:
            raise SbpError(f"{name}: there is no option {strange}=\n  {did_you_mean(f'{strange}=', known)}")
        return cls(**{**given, "name": name})

    @cached_property
    def policy(self) -> Schedule:
        """The schedule of the actors: by name, by text or as it is; 1F1B where nothing is said."""
        return schedule_of(self.schedule, self.slices)

    @cached_property
    def ends(self) -> Folding | None:
        """The folding of chunks that end one by one, if they do."""
        if self.overlap is False and not self.post_validation:
            return None
        return self.overlap if isinstance(self.overlap, Folding) else Folding(beside=self.overlap)

    @cached_property
    def flows(self) -> dict[str, Pin]:
        """The pins of arguments, by their names."""
        if not (self.inputs is None or isinstance(self.inputs, Mapping)):
            raise SbpError(
                f"inputs={self.inputs!r}\n  give it signatures by name, as in inputs={{'tokens': {{'data': S(0)}}}}"
            )
        found: dict[str, Pin] = {}
        for name, sbp in (self.inputs or {}).items():
            try:
                pin = Pin.read(sbp, f"the argument {name}")
            except SbpError as error:
                raise SbpError(f"inputs={{{name!r}: {sbp!r}}}\n  {error}") from None
            if any(isinstance(entry, Partial) for entry in pin.entries):
                raise SbpError(
                    f"inputs={{{name!r}: {pin}}}\n  an argument is the same for every rank, and no addend\n"
                    "  say S(d) where ranks are to have pieces, or B"
                )
            found[name] = pin
        return found

    @property
    def piped(self) -> bool:
        """Whether actors run the step, a micro-batch at a time."""
        return self.micro_batches > 1 or self.schedule is not None or self.slices is not None


def _check_positive(name: str, value: object, what: str) -> None:
    if not (value is None or (isinstance(value, int | float) and value > 0)):
        raise SbpError(f"{name}={value!r}\n  give it {what}, more than 0, or leave it out")


def schedule_of(given: "str | Schedule | None", slices: "int | Sequence[int] | None" = None) -> Schedule:
    """A schedule by name, text or as it is; 1F1B where nothing is said, and that of slices where there are some."""
    lengths = [slices] if isinstance(slices, int) else list(slices or [])
    if slices is not None and not (lengths and all(type(n) is int and n > 0 for n in lengths)):
        raise SbpError(f"slices={slices!r}\n  give it how many to cut a sequence into, as in 4, or the tokens of each")
    if not (given is None or isinstance(given, str | Schedule)):
        raise SbpError(f"schedule={given!r}\n  give the name of one, its text, or a Schedule")
    if isinstance(given, str):
        given = Schedule.read(given) if len(given.split()) > 1 else published(given)
    made = given or published("1f1b" if slices is None else "terapipe")
    if made.slices != (slices is not None):
        what = (
            "cuts sequences into slices" if made.slices else "goes back from the first part of a sequence to the last"
        )
        fix = "say how many by slices=, as in slices=4" if made.slices else "leave slices= out, or take 'terapipe'"
        raise SbpError(f"schedule={made.name!r} with slices={slices!r}: {made.name} {what}\n  {fix}")
    return made
