"""The degrees that a plan leaves open: axes of its grid, micro-batches, schedules, blocks that run again, the host.

Every combination is a plan of its own in the plan language. Tensors are cut inside of a node, stages stand outermost,
and samples are cut between: neighbours have the quicker links, and the more is moved, the nearer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ...language.plan_text import PlanText
from ...language.statements import (
    Accumulate,
    DrawBy,
    Grid,
    Input,
    Inside,
    Limit,
    Offload,
    Pipe,
    Rest,
    Seek,
    Statement,
    TakePlan,
)
from .blocks_again import NONE, BlocksAgain

__all__ = ["AXES", "OPEN", "THINGS", "Degrees", "Pipeline", "Space", "divisors"]

AXES = ("pipe", "data", "tensor")
ORDER = ("pipe", "data", "context", "tensor")  # the outermost first
OPEN = "{weights,grads,states} **: ?"
THINGS = (*AXES, "expert", "context", "micro-batches", "schedule", "recompute", "offload")
CHUNKS = (2, 3, 4)  # of a device, under schedules that have several
MOST_SAMPLES = 64  # of a micro-batch on a rank of `data`, unless it is the whole batch
LONG, PART = 2**14, 2**13  # words of a sample that may be cut, into parts of so many
HOSTED = {("states",): "states", ("states", "saved"): "states and activations"}  # what is tried first comes first
MOST_EXPERT = 64  # ranks between which tokens are sent to experts


@dataclass(frozen=True)
class Pipeline:
    """A schedule with so many chunks a device."""

    schedule: str = "1f1b"
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.schedule} v={self.chunks}" if self.schedule == "interleaved" else self.schedule


PIPELINES = (Pipeline(), *(Pipeline("interleaved", v) for v in CHUNKS), Pipeline("zb_h1"), Pipeline("zb_v", 2))


@dataclass(frozen=True)
class Degrees:
    """One choice: sizes of the axes, micro-batches, by which schedule, and which blocks run again; `spread` has
    weights and gradients in pieces over `data` too, as ZeRO-3 does. Of the ranks of `data` so many share the experts of
    a layer as `expert` says; so many as `context` says share the words of a sample. On the `host` lie states, and with
    `saved` activations too."""

    pipe: int
    data: int
    tensor: int
    micro_batches: int
    by: Pipeline = Pipeline()
    again: BlocksAgain = NONE
    spread: bool = False
    expert: int = 1
    context: int = 1
    host: tuple[str, ...] = ()

    @property
    def alike(self) -> int:
        """The ranks with the same weights."""
        return self.data * self.context

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name in (*ORDER, "expert") if (size := getattr(self, name)) > 1]
        parts = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "one micro-batch"
        by = f" under {self.by}" if self.pipe > 1 else ""
        more = ["weights in pieces"] * self.spread + [str(self.again)] * bool(self.again)
        more += [f"{HOSTED[self.host]} on the host"] if self.host else []
        return ", ".join([*(axes or ["one rank"]), f"{parts}{by}", *more])


def divisors(n: int) -> list[int]:
    """All divisors of a number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [k for k in range(1, n + 1) if n % k == 0]


@dataclass(frozen=True)
class Space:
    """The choices that a plan leaves open: on so many ranks, so many in a node, for a batch of so many samples.

    `sizes` has the axes that the plan names; None is a size that is looked for. `blocks` is the pattern of the layers
    that repeat, "" where none do; `lists` the paths of their lists, each with `count` layers; none where lists are of
    unequal lengths. Modules of the pattern `mixtures` have so many `experts` each, and samples `length` words, 0 where
    they are of something else. Where the model `draws` random numbers, or may, micro-batches draw their own: those of a
    batch are held.
    """

    given: PlanText
    kind: str
    ranks: int
    node: int
    batch: int
    blocks: str
    lists: tuple[str, ...]
    count: int
    sizes: dict[str, int | None]
    seeks: frozenset[str]
    mixtures: str = ""
    experts: int = 0
    length: int = 0
    draws: bool = True

    @property
    def layers(self) -> str:
        """The path of the one list that could be stages, "" where there are several."""
        return self.lists[0] if len(self.lists) == 1 else ""

    def every(self) -> Iterator[Degrees]:
        """All choices without schedules but the first, and without blocks that run again."""
        for tensor in self.tensors:
            for pipe, context in product(self.pipes(tensor), self.contexts):
                data, rest = divmod(self.ranks, tensor * pipe * context)
                if rest == 0 and self.sizes.get("data", data) in (None, data) and self.batch % data == 0:
                    for parts in self.parts(self.batch // data):
                        if pipe == 1 or parts > 1:
                            yield Degrees(pipe, data, tensor, parts, context=context)

    @property
    def contexts(self) -> list[int]:
        """The ranks that may share the words of a sample: one, or where words are many, as many as leave each about
        as many as one has elsewhere."""
        asked = "context" in self.seeks and self.length >= LONG and self.blocks and self.open_rest
        if not asked or self._says(Inside) or self._says(Input):
            return [1]
        size = 1 << (self.length // PART).bit_length() - 1
        return [1, size] if self.length % size == 0 else [1]

    @property
    def tensors(self) -> list[int]:
        """The sizes of `tensor`, the largest first: weights of fewer ranks take more of each."""
        size = self.sizes.get("tensor", 1)
        return [size] if size else [n for n in reversed(divisors(min(self.node, self.ranks))) if self.ranks % n == 0]

    def pipes(self, tensor: int) -> list[int]:
        size, left = self.sizes.get("pipe", 1), self.ranks // tensor
        if size:
            return [size] if left % size == 0 else []
        return [n for n in divisors(left) if n <= self.count] if self.layers else [1]

    def parts(self, samples: int) -> list[int]:
        """The micro-batches into which so many samples of a rank are cut."""
        said = self.said
        if said is not None:
            return [said] if samples % said == 0 else []
        if "micro-batches" not in self.seeks:
            return [1]
        could = [n for n in divisors(samples) if n <= MOST_SAMPLES and n & (n - 1) == 0]
        return [samples // n for n in dict.fromkeys([*could, samples])]

    @property
    def said(self) -> int | None:
        return self.said_of(self.given)

    @staticmethod
    def said_of(given: PlanText) -> int | None:
        """The micro-batches that a plan itself says."""
        found = (s.micro_batches for s in given.statements if isinstance(s, Accumulate | Pipe))
        return next((many for many in found if many is not None), None)

    def samples(self, at: Degrees) -> int:
        """Those of a micro-batch on a rank of `data`."""
        return self.batch // at.data // at.micro_batches

    def expert_sizes(self, of: Degrees) -> list[int]:
        """The ranks of `data` that could share the experts: as many as there are in a node, and as many as can be."""
        if "expert" not in self.seeks or of.context > 1 or not self.open_rest or self._says(Inside):
            return []
        could = [n for n in divisors(self.experts) if 1 < n <= MOST_EXPERT]
        inside = [n for n in could if n <= self.node // of.tensor]
        most = could[-1:] if of.tensor == 1 else []  # with cut experts between nodes few tokens go to each
        return [n for n in sorted({*inside[-1:], *most}) if of.data % n == 0]

    def pipelines(self, of: Degrees) -> Sequence[Pipeline]:
        """The schedules that can be used for a choice."""
        if of.pipe == 1 or "schedule" not in self.seeks:
            return (Pipeline(),)
        return [
            by
            for by in PIPELINES
            if by.chunks == 1 or (self.count % (of.pipe * by.chunks) == 0 and of.micro_batches % of.pipe == 0)
        ]

    @property
    def open_rest(self) -> bool:
        """Whether the plan says nothing of weights."""
        return not any(isinstance(s, Rest | TakePlan) for s in self.given.statements)

    @property
    def may_run_again(self) -> bool:
        return "recompute" in self.seeks and bool(self.blocks)

    def hosts(self, before: tuple[str, ...]) -> tuple[str, ...] | None:
        """Kinds of values on the host where those there `before` are not enough; None where nothing more can."""
        if "offload" not in self.seeks or self._says(Offload):
            return None
        could = [host for host in HOSTED if self.blocks or "saved" not in host]
        return next((host for host in could if len(host) > len(before)), None)

    def text(self, of: Degrees, *, sample: bool = False, opened: bool = False) -> str:
        """The plan of a choice; a `sample` keeps to a simple schedule, whatever the plan says. With `opened` the
        chooser says how weights, gradients and states lie."""
        lines = [f"grid {self.kind} ({', '.join(self._axes(of))})"]
        if self.open_rest:
            lines += [OPEN] if opened else self._rests(of)
        own = Grid | Seek | Limit | Pipe | Accumulate
        lines += [line.text for line in self.given.lines if not isinstance(line.statement, own)]
        if of.pipe > 1 or (self._pipe is not None and "pipe" in self.sizes):
            lines.append(self._piped(of, sample))
        elif of.micro_batches > 1 or self._says(Accumulate):
            lines.append(f"{of.micro_batches} micro-batches")
        if self.draws and (of.pipe > 1 or of.micro_batches > 1) and not self._says(DrawBy):
            lines.append(str(DrawBy(each=True)))
        lines += of.again.lines(self.blocks, stages=of.pipe > 1)
        lines += [f"offload {what} {'**' if what == 'states' else self.blocks} to cpu" for what in of.host]
        return "\n".join(lines)

    def _says(self, kind: type[Statement]) -> bool:
        return any(isinstance(s, kind) for s in self.given.statements)

    @property
    def _pipe(self) -> Pipe | None:
        return next((s for s in self.given.statements if isinstance(s, Pipe)), None)

    def _axes(self, of: Degrees) -> list[str]:
        """The axes of the grid: those that the plan names, and those of more than one rank."""
        named = [s for s in self.given.statements if isinstance(s, Grid)]
        folds = [str(axis) for s in named for axis in s.axes if axis.folds is not None]
        said = {axis.name for s in named for axis in s.axes}
        own = [f"{name}={size}" for name in ORDER if (size := getattr(of, name)) > 1 or name in said]
        folds += [f"expert={of.expert} folds data"] if of.expert > 1 else []
        return [*(own or ["data=1"]), *folds]

    def _rests(self, of: Degrees) -> Iterator[str]:
        """How weights rest: cut along `tensor` as the chooser likes, states in pieces over `data`."""
        if of.tensor > 1:
            yield "{weights,grads,states} **: tensor=?"
        if of.alike > 1:
            over = ", ".join(f"{name}=S(0)" for name in ("data", "context") if getattr(of, name) > 1)
            yield f"**: {over}" if of.spread else f"states **: {over}"
        if of.context > 1:
            yield "input * <- data=S(0), context=S(1)" if of.data > 1 else "input * <- context=S(1)"
            yield f"inside {self.blocks} use ring over context"
        if of.expert > 1:
            yield f"{self.mixtures}.*: expert=S(0)"
            if of.data > of.expert and self.experts % of.data:  # too few for a part of one on each rank
                yield f"states {self.mixtures}.*: expert=S(0), data=S(1)"
            yield f"inside {self.mixtures} use dropless over expert"

    def _piped(self, of: Degrees, sample: bool) -> str:
        said = self._pipe
        path, over = (said.path, said.over) if said is not None else (self.layers, "pipe")
        by: object = of.by
        if said is not None and "schedule" not in self.seeks and not sample:
            by = " ".join([said.schedule, *(f"{name}={many}" for name, many in said.marks)])
        return f"pipe {path} over {over} by {by}, {of.micro_batches} micro-batches"
