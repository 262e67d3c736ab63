"""The op database: every operator PyTorch tests itself with, run on global tensors and held against plain ones.

    python -m tests.nn.opdb [--ops add mm ...] [--jobs 2] [--limit 180] [--out ops.json] [--system sbpflow]

An op runs on several of its own samples, float32, under several combinations of layouts: each tensor argument is B,
S(d) on any dim, even or not, or P, whose addends sum to it exactly. Values, and gradients for a random cotangent, must
be those of plain torch, random numbers included. Ops run in worker processes, so that one that crashes or never ends
is an error of its own. `oppool` has the workers, the command line and the report.
"""

import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import sbpflow
from tests.nn.systems import RANKS, SYSTEMS, Disagree, System

__all__ = ["Verdict", "combos", "database", "judge"]

SAMPLES, COMBOS, LOOK = 4, 10, 80  # samples an op, combinations a sample, samples to choose from
SIZES = ({"L": 24, "M": 12, "S": 4, "XS": 2}, {"L": 20, "M": 10, "S": 5, "XS": 3})  # mostly even on 4 ranks; mostly not
AS_WRITTEN = ("_segment_reduce",)  # samples with offsets that fit no other size; beyond it, torch reads what is there
RTOL, ATOL = 1e-3, 1e-4  # ranks add in another order
HUGE = 1e18  # twice its square would overflow: not split into addends
UNINITIALISED = ("empty", "new_empty", "resize_", "resize_as_")  # what they hold is chance; the shape must agree
HOME = Path(sbpflow.__file__).parent
ELSEWHERE = ("sparse.", "jiterator")

Combo: TypeAlias = tuple[str, ...]  # one of "B", "P", "S0", "S1", ... for each tensor argument


@dataclass
class Verdict:
    """What came of an op. Pairs are combinations that were right, and all. `stays` says what needed no sending."""

    forward: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)
    wrong: list[str] = field(default_factory=list)  # values that differ, and nothing said so
    errors: dict[str, int] = field(default_factory=dict)
    example: dict[str, str] = field(default_factory=dict)  # error -> where it was met first
    stays: tuple[int, list[int]] | None = None  # dims of some tensor argument, and which of them may be split
    skipped: str = ""

    @property
    def forward_right(self) -> bool:
        return not self.skipped and self.forward[0] == self.forward[1] > 0

    @property
    def both_right(self) -> bool:
        return self.forward_right and self.backward[0] == self.backward[1]


@dataclass
class Sample:
    """One call as PyTorch's own tests make it, taken apart: `at` are the leaves that are tensors."""

    leaves: list[Any]
    spec: Any
    at: list[int]
    process: Callable[[Any], Any]  # what of the outputs has a gradient that is well-defined

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.at]

    def text(self, combo: Combo) -> str:
        """The call in short: layout and shape of tensors, and all other arguments."""
        entries = iter(combo)
        words = [f"{next(entries)} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)[:40] for x in self.leaves]
        return ", ".join(words)

    def call(self, op: Any, tensors: Sequence[Tensor], seed: int) -> Any:
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        torch.manual_seed(seed)
        return op.op(*args, **kwargs)


@dataclass
class Truth:
    """What plain torch gives: outputs and, where it has gradients, cotangents and the gradients of the inputs."""

    out: Any
    cotangents: list[Tensor | None]
    grads: list[Tensor | None] | None


def database() -> dict[str, Any]:
    """Every op with float32, by name. Loading it changes settings of torch, so only workers do."""
    from torch.testing._internal.common_methods_invocations import op_db

    float32 = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]  # type: ignore[no-untyped-call]
    return {op.full_name: op for op in float32}


def samples(op: Any) -> list[Sample]:
    """A spread over the op's samples, those first that ranks can share, sizes even and uneven in turn."""
    pools = [spread(ranked(op, sizes)) for sizes in (SIZES[1:] if op.name in AS_WRITTEN else SIZES)]
    turns = [pools[(k + turn) % len(pools)][k : k + 1] for turn in range(len(pools)) for k in range(SAMPLES)]
    return [sample for turn in turns for sample in turn][:SAMPLES]


def spread(pool: list[Sample]) -> list[Sample]:
    count = sum(map(shared, pool))
    if count < SAMPLES:
        return pool[:SAMPLES]
    return [pool[k * (count - 1) // (SAMPLES - 1)] for k in range(SAMPLES)]


def ranked(op: Any, sizes: dict[str, int]) -> list[Sample]:
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for letter, size in sizes.items():
                if isinstance(getattr(module, letter, None), int):
                    setattr(module, letter, size)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # some generators of samples use it
    found = []
    try:
        for given in islice(op.sample_inputs("cpu", torch.float32, requires_grad=gradients(op)), LOOK):
            leaves, spec = tree_flatten(((given.input, *given.args), dict(given.kwargs)))
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            if at and all(leaves[i].layout is torch.strided for i in at):
                found.append(Sample(leaves, spec, at, given.output_process_fn_grad))
    except Exception:
        pass  # a few generators assume the sizes they were written for
    return sorted(found, key=lambda sample: not shared(sample))


def shared(sample: Sample) -> bool:
    return any(n >= RANKS for t in sample.tensors for n in t.shape) and all(t.numel() for t in sample.tensors)


def gradients(op: Any) -> bool:
    return op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")


def combos(tensors: Sequence[Tensor], seed: int) -> tuple[list[Combo], list[Combo]]:
    """Combinations to check: all B, some with a single split, some at random; and every one with a single split."""
    chance = random.Random(seed)
    options = [["B", *(f"S{d}" for d in range(t.ndim)), *(["P"] if addable(t) else [])] for t in tensors]
    whole = ("B",) * len(tensors)
    single = [
        (*whole[:i], entry, *whole[i + 1 :]) for i, some in enumerate(options) for entry in some if entry[0] == "S"
    ]
    chosen = [whole, *chance.sample(single, min(len(single), COMBOS // 2))]
    if len(options) <= 4:
        rest = [combo for combo in product(*options) if combo not in chosen]
        chosen += chance.sample(rest, min(len(rest), COMBOS - len(chosen)))
    else:
        some_more = {tuple(map(chance.choice, options)) for _ in range(COMBOS - len(chosen))}
        chosen += sorted(some_more - set(chosen))
    return chosen, single


def addable(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool((tensor.detach().abs() < HUGE).all())


def judge(op: Any, system: System) -> Verdict:
    """Run an op on its samples under their combinations."""
    verdict = Verdict()
    if op.full_name.startswith(ELSEWHERE):
        return Verdict(skipped="of sparse tensors, or CUDA only")
    stays: dict[int, set[int]] = {}
    found = False
    for k, sample in enumerate(samples(op)):
        found = True
        seed = crc32(f"{op.full_name} {k}".encode())
        try:
            truth = plainly(op, sample, seed)
        except Exception:
            continue  # plain torch refuses the sample
        chosen, single = combos(sample.tensors, seed)
        for combo in chosen:
            check(op, sample, combo, truth, system, seed, verdict)
        for combo in single:
            at = next(i for i, entry in enumerate(combo) if entry != "B")
            tensor, dim = sample.tensors[at], int(combo[at][1:])
            if tensor.shape[dim] > 1 and stays_split(op, sample, combo, system, seed):
                stays.setdefault(tensor.ndim, set()).add(dim)
    if verdict.forward[1] == 0:
        verdict.skipped = "plain torch refuses every sample" if found else "no tensor goes in"
    if stays:
        verdict.stays = max(((ndim, sorted(dims)) for ndim, dims in stays.items()), key=lambda s: (len(s[1]), -s[0]))
    return verdict


def plainly(op: Any, sample: Sample, seed: int) -> Truth:
    tensors = [clone(t) for t in sample.tensors]
    out = sample.call(op, tensors, seed)
    if not any(t.requires_grad for t in tensors):
        return Truth(out, [], None)
    try:
        ends = outputs(sample, out)
        generator = torch.Generator().manual_seed(seed)
        cotangents = [cotangent(end, generator) for end in ends]
        if all(c is None for c in cotangents):
            return Truth(out, [], None)
        return Truth(out, cotangents, differentiate(SYSTEMS["plain"](), tensors, ends, cotangents))
    except (RuntimeError, NotImplementedError):
        return Truth(out, [], None)  # torch itself has no gradient here


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def outputs(sample: Sample, out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(sample.process(out))[0] if isinstance(leaf, Tensor)]


def cotangent(end: Tensor, generator: torch.Generator) -> Tensor | None:
    return torch.randn(end.shape, dtype=end.dtype, generator=generator) if end.requires_grad else None


def differentiate(
    system: System, tensors: Sequence[Tensor], ends: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the tensors that want one, None for the others."""
    pairs = [(end, c) for end, c in zip(ends, cotangents, strict=True) if c is not None]
    wanted = [t for t in tensors if t.requires_grad]
    grads = iter(system.grad([end for end, _ in pairs], wanted, [c for _, c in pairs]))
    return [next(grads) if t.requires_grad else None for t in tensors]


def check(op: Any, sample: Sample, combo: Combo, truth: Truth, system: System, seed: int, verdict: Verdict) -> None:
    """One combination, forward and, where plain torch has a gradient, backward."""

    def tell(direction: str, problem: str) -> None:
        verdict.wrong.append(f"{direction}: {problem} for {sample.text(combo)}")

    def fail(direction: str, error: Exception) -> None:
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = f"{direction}: {type(error).__name__}: {' | '.join(lines[:2])[:240]}"
        verdict.errors[text] = verdict.errors.get(text, 0) + 1
        verdict.example.setdefault(text, f"{sample.text(combo)}, at {', '.join(path(error))}")

    right, both = 0, 0
    try:
        tensors = [system.make(t, entry, seed) for t, entry in zip(sample.tensors, combo, strict=True)]
        out = sample.call(op, tensors, seed)
        problem = difference(out, truth.out, system, values=not op.name.startswith(UNINITIALISED))
        if problem:
            tell("forward", problem)
        else:
            right = 1
    except Disagree as error:
        tell("forward", str(error))
    except Exception as error:
        fail("forward", error)
    if right and truth.grads is not None:
        try:
            grads = differentiate(system, tensors, outputs(sample, out), [system.like(c) for c in truth.cotangents])
            problem = next((p for g, t in zip(grads, truth.grads, strict=True) if (p := unlike(g, t, system))), None)
            if problem:
                tell("backward", problem)
            else:
                both = 1
        except Disagree as error:
            tell("backward", str(error))
        except Exception as error:
            fail("backward", error)
    verdict.forward = (verdict.forward[0] + right, verdict.forward[1] + 1)
    if truth.grads is not None:
        verdict.backward = (verdict.backward[0] + both, verdict.backward[1] + 1)


def path(error: Exception) -> list[str]:
    """The last lines of ours that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(f"{HOME}/")]
    return [f"{f.filename.removeprefix(f'{HOME}/')}:{f.lineno}" for f in ours[-2:]]


def stays_split(op: Any, sample: Sample, combo: Combo, system: System, seed: int) -> bool:
    """Whether the op ran without sending a byte and left something split, or addends."""
    try:
        tensors = [system.make(t, entry, seed) for t, entry in zip(sample.tensors, combo, strict=True)]
        with system.watch() as sent:
            out = sample.call(op, tensors, seed)
        return sent() == 0 and any(system.split(leaf) for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor))
    except Exception:
        return False  # told by `check`


def unlike(grad: Tensor | None, truth: Tensor | None, system: System) -> str | None:
    """How two gradients differ; none at all is zero."""
    if grad is None or truth is None:
        some = truth if grad is None else system.read(grad)
        return None if some is None or not some.any() else "a gradient is missing, or should be"
    return difference(grad, truth, system)


def difference(ours: Any, theirs: Any, system: System, *, values: bool = True) -> str | None:
    """How results differ, in words, or None."""
    mine, yours = tree_flatten(ours)[0], tree_flatten(theirs)[0]
    if len(mine) != len(yours):
        return f"{len(mine)} results instead of {len(yours)}"
    for a, b in zip(mine, yours, strict=True):
        if not isinstance(b, Tensor):
            close = a == b or (isinstance(b, float | complex) and np.allclose(a, b, RTOL, ATOL, equal_nan=True))
            if values and not close:
                return f"{a!r} instead of {b!r}"[:200]
            continue
        if not isinstance(a, Tensor):
            return f"{type(a).__name__} instead of a tensor"
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        if not values:
            continue
        whole, b = system.read(a).detach(), b.detach()
        if whole.layout is not torch.strided:
            whole, b = whole.to_dense(), b.to_dense()
        if whole.shape != b.shape or not torch.allclose(whole, b, RTOL, ATOL, equal_nan=True):
            return "other values"
    return None


if __name__ == "__main__":
    from tests.nn.oppool import main

    main()
