"""Random small programs, run on plain torch and on global tensors of random layouts: where the two differ.

A program is text, one statement a line, so that a failing one can be cut down line by line and printed as code.
"""

# mypy: disallow-untyped-calls=False

import operator
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow import B, P, S
from tests.nn.fuzz_steps import STEPS, Scene

__all__ = ["Program", "differs", "draw", "shrink"]

GRIDS: list[tuple[int, ...]] = [(1,), (2,), (4,), (2, 2), (1, 2), (2, 3), (2, 2, 2)]
SHAPES: list[tuple[int, ...]] = [
    (4, 6),
    (3, 4),
    (5,),
    (2, 3, 4),
    (4, 4),
    (1, 6),
    (3, 1),
    (),
    (7, 2),
    (2, 2, 3),
    (8,),
    (0, 3),
]
# Errors that say that something is not supported or allowed, on either side.
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)

WRITES = re.compile(r"\w_\(|\] =|[-+*]= ")
# What global tensors refuse though one tensor does not, and say so.
REFUSED = (
    "a hook was put on a global tensor that had been used before",
    "was written to after x.retain_grad(), and its gradient was not kept",
    "function that returns multiple views",
    "modified by an inplace operation",  # other ops may run there, which save other tensors
)


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from: how it lies, and whether its gradient is looked at."""

    shape: tuple[int, ...]
    sbp: tuple[str, ...]
    grad: bool = True


@dataclass(frozen=True)
class Program:
    """Statements about the leaves x0, x1, ... on a grid; `ending` says how gradients are asked for."""

    grid: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    lines: tuple[str, ...]
    ending: str = "backward"

    def code(self) -> str:
        """What reproduces a difference."""
        lines = "".join(f"        {line!r},\n" for line in self.lines)
        return (
            "from tests.nn.fuzz import Leaf, Program, differs\n\nprint(differs(Program(\n"
            f"    grid={self.grid},\n    leaves={self.leaves},\n    lines=(\n{lines}    ),\n"
            f"    ending={self.ending!r},\n)))\n"
        )


def sbp_of(text: str) -> Any:
    return {"B": B, "P": P}.get(text) or S(int(text[2:-1]))


def some_sbp(rng: random.Random, ndim: int, axes: int, dtype: torch.dtype = torch.float64) -> tuple[str, ...]:
    kinds = ["B", *(["P"] if dtype.is_floating_point else []), *[f"S({d})" for d in range(ndim)] * 2]
    return tuple(rng.choice(kinds) for _ in range(axes))


def value(number: int, shape: Sequence[int]) -> Tensor:
    """The values of a leaf or constant: by its number and shape, and never two alike."""
    made = torch.Generator().manual_seed(1000 + number)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=made)


class Runner:
    """Runs a program; a plain one without layouts, nudged by `eps` to see whether it is stable."""

    def __init__(self, program: Program, *, plain: bool, eps: float = 0.0) -> None:
        self.program, self.plain, self.eps = program, plain, eps
        count = 1
        for n in program.grid:
            count *= n
        self.home = flow.placement("cpu", torch.arange(count).reshape(program.grid).tolist())
        self.other = flow.placement("cpu", list(range(2)))
        self.env: dict[str, Any] = {
            "torch": torch, "F": F, "checkpoint": checkpoint, "const": value, "move": self.move, "whole": self.whole,
            "operator": operator,
        }  # fmt: skip

    def move(self, x: Tensor, number: int) -> Tensor:
        """The same tensor lying otherwise, as a new one."""
        if not isinstance(x, flow.GlobalTensor):
            return x.clone()
        rng = random.Random(number)
        if number % 5 == 0:  # by another placement
            x = x.to_global(placement=self.other, sbp=sbp_of(some_sbp(rng, x.ndim, 1, x.dtype)[0]))
        to = tuple(map(sbp_of, some_sbp(rng, x.ndim, len(self.program.grid), x.dtype)))
        y = x.to_global(placement=self.home, sbp=to)
        return y.clone() if y is x else y

    def whole(self, x: Tensor) -> Tensor:
        """A plain constant of the tensor's values."""
        return x.full_tensor().detach().clone() if isinstance(x, flow.GlobalTensor) else x.detach().clone()

    def leaf(self, number: int) -> Tensor:
        leaf = self.program.leaves[number]
        values = value(number, leaf.shape) * (1 + self.eps)
        if self.plain:
            return values.requires_grad_(leaf.grad)
        sbp = tuple(map(sbp_of, leaf.sbp))
        return flow.tensor(values, placement=self.home, sbp=sbp, requires_grad=leaf.grad)

    def start(self) -> None:
        torch.manual_seed(0)
        for number in range(len(self.program.leaves)):
            self.env[f"x{number}"] = self.leaf(number)

    def step(self, line: str) -> None:
        name, _, rest = line.partition(".")
        if self.plain and rest.startswith("register_hook("):
            # On a part of what was written to since, torch crashes if its node has not been looked at.
            _ = self.env[name].grad_fn
        exec(line, self.env)

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.env.items() if isinstance(t, Tensor)}

    def finish(self) -> dict[str, Any]:
        """Gradients of everything that has one, and every value."""
        leaves = [self.env[f"x{i}"] for i, leaf in enumerate(self.program.leaves) if leaf.grad]
        terms = [t for t in self.tensors().values() if t.requires_grad and not any(t is x for x in leaves)]
        seen: dict[str, Any] = {}
        if terms:
            parts = [(t * value(77 + i, t.shape).to(t.dtype)).sum().double() for i, t in enumerate(terms)]
            loss = torch.stack(parts).sum()
            if self.program.ending == "grad of grad":
                first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
                seen["grad"] = [None if g is None else read(g) for g in first]
                loss = torch.stack([loss, *((g * g).sum() for g in first if g is not None)]).sum()
            again = self.program.ending == "backward twice"
            loss.backward(retain_graph=again)
            if again:
                (loss * 2).backward()
        # What was written to has a gradient for either value, and one of a gradient depends on what an op saved.
        quiet = self.program.ending == "grad of grad" or any(map(WRITES.search, self.program.lines))
        for name, t in self.tensors().items():
            if quiet and t.requires_grad and not any(t is x for x in leaves):
                seen[name] = read(t)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen[name] = read(t), None if t.grad is None else read(t.grad)
        return seen


def read(t: Tensor) -> Any:
    full = t.full_tensor() if isinstance(t, flow.GlobalTensor) else t
    return tuple(t.shape), t.dtype, t.requires_grad, full.detach().clone()


def outcome(program: Program, *, plain: bool, eps: float = 0.0) -> Any:
    """What a program gives; the error that it raises, if it does."""
    runner = Runner(program, plain=plain, eps=eps)
    try:
        runner.start()
        for line in program.lines:
            runner.step(line)
        return runner.finish()
    except ERRORS as error:
        return error


def same(a: Any, b: Any, loose: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.dtype.is_floating_point:
            return loose > 0.01 or torch.equal(a, b)
        finite = a[a.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        bound = loose or (1e-4 if a.dtype is torch.float32 else 1e-8)
        return torch.allclose(a, b, 0, bound * scale, equal_nan=True)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y, loose) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def compare(wanted: Any, got: Any, loose: float) -> str:
    """What differs, in a line; nothing where all is well or plain torch raised."""
    if isinstance(wanted, Exception):
        return ""  # global tensors may support more
    if isinstance(got, Exception) and any(text in str(got) for text in REFUSED):
        return ""
    if isinstance(got, Exception):
        return f"{type(got).__name__}: {str(got)[:300]}"
    if wanted.keys() != got.keys():
        return f"names {sorted(wanted)} and {sorted(got)}"
    for name in wanted:
        if not same(wanted[name], got[name], loose):
            return f"{name} is {got[name]}\n  not {wanted[name]}"
    return ""


def slack(program: Program) -> float:
    """How far values of less precision may be apart, by the largest of a tensor."""
    text = " ".join(program.lines)
    return 0.1 if "autocast" in text else 1e-4 if "float32" in text or ".float()" in text else 0.0


def differs(program: Program) -> str:
    """Where global tensors give something else than one tensor; nothing where rounding alone could do that."""
    wanted = outcome(program, plain=True)
    found = compare(wanted, outcome(program, plain=False), slack(program))
    if found and not isinstance(wanted, Exception):
        for eps in (1e-13, -1e-13):
            if compare(wanted, outcome(program, plain=True, eps=eps), slack(program)):
                return ""
    return found


def draw(seed: int) -> Program:
    """A program by its number. Each line is tried on plain tensors as it is drawn."""
    rng = random.Random(seed)
    grid = rng.choice(GRIDS)
    shapes = rng.sample(SHAPES, 2) if rng.random() < 0.7 else [rng.choice(SHAPES)] * 2
    leaves = tuple(Leaf(s, some_sbp(rng, len(s), len(grid)), rng.random() < 0.85) for s in [*shapes, shapes[0]])
    ending = rng.choice(["backward", "backward", "backward twice", "grad of grad"])
    program = Program(grid, leaves, (), ending)
    runner = Runner(program, plain=True)
    runner.start()
    scene = Scene(rng, runner.env, smooth=ending == "grad of grad")
    lines: list[str] = []
    steps, weights = list(STEPS), [s.weight for s in STEPS.values()]
    target = rng.randint(5, 12)
    for _ in range(60):
        if len(lines) >= target:
            break
        name = rng.choices(steps, weights)[0]
        if scene.smooth and not STEPS[name].smooth:
            continue
        before = set(runner.env)
        try:
            line = STEPS[name].draw(scene)
        except RuntimeError:  # of views of one call that were written to, torch tells nothing
            break
        # Torch has nan for the second gradient of a logcumsumexp where the first is zero, as addends are on some ranks.
        if line is None or (scene.smooth and "logcumsumexp" in line):
            continue
        try:
            runner.step(line)
        except ERRORS:
            if rng.random() < 0.97:
                continue  # else the program ends in what both have to refuse
            lines.append(line)
            break
        if any(t.numel() > 600 for n, t in runner.tensors().items() if n not in before):
            return replace(program, lines=tuple(lines))
        lines.append(line)
    return replace(program, lines=tuple(lines))


def shrink(program: Program, fails: Callable[[Program], bool] = lambda p: bool(differs(p))) -> Program:
    """The same failure with as few lines, and as many leaves that are simply B, as it takes."""
    changed = True
    while changed:
        changed = False
        for at in reversed(range(len(program.lines))):
            less = replace(program, lines=program.lines[:at] + program.lines[at + 1 :])
            if fails(less):
                program, changed = less, True
    for i, leaf in enumerate(program.leaves):
        simple = replace(leaf, sbp=("B",) * len(leaf.sbp))
        for other in (replace(simple, grad=False), simple, replace(leaf, grad=False)):
            less = replace(program, leaves=(*program.leaves[:i], other, *program.leaves[i + 1 :]))
            if other != leaf and fails(less):
                program = less
                break
    return replace(program, ending="backward") if fails(replace(program, ending="backward")) else program
