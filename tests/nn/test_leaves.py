"""Leaves that torch's functions and users' shards make: they get gradients, and are leaves where torch's are."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from tests.nn.either import Maker, X, differs
from tests.ranks import Ranks

LINE = flow.placement("cpu", range(4))
SHAPE = (4, 6)
FACTORIES: dict[str, Callable[[Any], Tensor]] = {
    "ones_like": lambda x: torch.ones_like(x, requires_grad=True),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True, dtype=torch.float32),
    "empty_like": lambda x: torch.empty_like(x, requires_grad=True),
    "full_like": lambda x: torch.full_like(x, 2, requires_grad=True),
    "rand_like": lambda x: torch.rand_like(x, requires_grad=True),
    "randn_like": lambda x: torch.randn_like(x, requires_grad=True),
    "randint_like": lambda x: torch.randint_like(x, 5, requires_grad=True),
    "new_zeros": lambda x: x.new_zeros(*SHAPE, requires_grad=True),
    "new_ones": lambda x: x.new_ones(SHAPE, requires_grad=True),
    "new_empty": lambda x: x.new_empty(SHAPE, requires_grad=True),
    "new_full": lambda x: x.new_full(SHAPE, 2, requires_grad=True),
    "new_empty_strided": lambda x: x.new_empty_strided(SHAPE, (6, 1), requires_grad=True),
    "new_tensor": lambda x: x.new_tensor(X.tolist(), requires_grad=True),
    "linspace": lambda x: torch.linspace(x.sum(), x.max(), 6, requires_grad=True),
    "logspace": lambda x: torch.logspace(x.min(), x.max(), 6, requires_grad=True),
    "Parameter": lambda x: nn.Parameter(x),
    "nothing of the kind": lambda x: torch.ones_like(x, requires_grad=False),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_to_require_grad_is_a_leaf_that_gets_one(name: str) -> None:
    def law(make: Maker) -> Any:
        seen = []
        for _ in range(2):  # the second time by what is known from the first
            x = FACTORIES[name](make(X))
            if x.requires_grad:
                x.register_hook(lambda g: g * 2)
                (x * make(X[0])).sum().backward()
            seen += [x.is_leaf, x.requires_grad, x.grad]
        return seen

    assert not differs(law)


def test_every_factory_of_torch_that_takes_a_tensor_is_tried() -> None:
    likes = {name for name in dir(torch) if name.endswith("_like") and not name.startswith("_")}
    assert likes | {name for name in dir(Tensor) if name.startswith("new_")} <= FACTORIES.keys()


def test_numbers_that_are_counted_are_no_leaves() -> None:
    assert not differs(lambda make: torch.ones_like(make(X), dtype=torch.int64, requires_grad=True))


def of_leaves(sbp: Any) -> list[Any]:
    """A global tensor of leaf shards is computed from them: it retains its gradient, and may be written to."""
    made = [torch.full((2, 3), float(r + 1), requires_grad=True) for r in flow.boxing.owned(LINE)]
    x = flow.from_local(made, placement=LINE, sbp=sbp)
    x.retain_grad()
    found: list[Any] = [x.is_leaf, x.requires_grad]
    (x * x).sum().backward()
    assert x.grad is not None
    found += [x.grad.full_tensor(), [w.grad.clone() for w in made if w.grad is not None]]
    y = flow.from_local(made, placement=LINE, sbp=sbp)
    y.mul_(3)
    y.sum().backward()
    with torch.no_grad():
        quiet = flow.from_local(made, placement=LINE, sbp=sbp).requires_grad
    return [*found, [w.grad for w in made], [w.detach() for w in made], quiet]


@pytest.mark.parametrize("sbp", [B, P, S(0), S(1)], ids=str)
def test_a_tensor_of_leaf_shards_is_no_leaf(ranks4: Ranks, sbp: Any) -> None:
    ranks = [1.0, 2.0, 3.0, 4.0]
    is_leaf, requires_grad, grad, first, second, kept, quiet = of_leaves(sbp)
    assert (is_leaf, requires_grad, quiet) == (False, True, False)
    terms = [sum(ranks)] * 4 if sbp == P else ranks
    for w, one, both, k, term in zip(kept, first, second, ranks, terms, strict=True):
        assert (w == k).all()
        assert (one == 2 * term).all()
        assert (both == 2 * term + 3).all()
    if sbp != B:  # ranks that pass different values as one get what each makes of it
        assert grad.sum() == sum((one.sum() for one in first[: 1 if sbp == P else 4]), torch.zeros(()))
    for rank, found in enumerate(ranks4(of_leaves, sbp)):
        assert found[:2] == [False, True]
        assert torch.equal(found[3][0], first[rank])
        assert torch.equal(found[4][0], second[rank])


def test_asking_a_shard_for_a_gradient_asks_it_of_nothing_else() -> None:
    x = flow.ones(4, 2, placement=LINE, sbp=S(0))
    shards = x.to_local()
    shards[0].requires_grad_()
    (shards[0] * 2).sum().backward()
    shards[1].add_(1)
    assert not x.requires_grad
    assert x.sum().item() == 10


def test_what_new_tensor_made_may_be_written_to() -> None:
    def law(make: Maker) -> Any:
        x, seen = make(X), []
        for _ in range(2):
            y = x.new_tensor([1.0, 2.0])
            y.add_(1)
            seen.append(y)
        return seen

    assert not differs(law)


@pytest.mark.parametrize("sbp", [B, P, S(0)], ids=str)
def test_one_tensor_passed_for_every_rank_is_not_one_memory(sbp: Any) -> None:
    x = flow.from_local([torch.ones(2)] * 4, placement=LINE, sbp=sbp).requires_grad_()
    (x * 3).sum().backward()
    assert x.grad is not None
    assert (x.grad.full_tensor() == 3).all()
    with torch.no_grad():
        x.add_(1) if sbp != P else x.mul_(2)
    assert all((shard == 2).all() for shard in x.to_local())


GRID = flow.placement("cpu", [[0, 1], [2, 3]])
COPIES: dict[
    str, tuple[Any, Callable[[int], int | None], int]
] = {  # which rows a rank holds, how often the value counts
    "(B, B)": ((B, B), lambda rank: None, 1),
    "(S(0), B)": ((S(0), B), lambda rank: rank // 2, 1),
    "(B, S(0))": ((B, S(0)), lambda rank: rank % 2, 1),
    "(P, B)": ((P, B), lambda rank: None, 2),
}


def of_one_value(name: str) -> Tensor:
    """A plain layer before the global tensor: every process has it, and so its own copy of what comes out."""
    sbp, rows, _ = COPIES[name]
    w = torch.arange(1.0, 13.0).reshape(4, 3).requires_grad_()
    h = w * 2
    halves: dict[int | None, Tensor] = {None: h, **dict(enumerate(h.chunk(2)))}
    x = flow.from_local([halves[rows(rank)] for rank in flow.boxing.owned(GRID)], placement=GRID, sbp=sbp)
    x.square().sum().backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("name", COPIES)
def test_one_value_that_several_ranks_hold_gets_its_gradient_once(ranks4: Ranks, name: str) -> None:
    times = COPIES[name][2]
    wanted = times**2 * 8 * torch.arange(1.0, 13.0).reshape(4, 3)
    assert torch.equal(of_one_value(name), wanted)
    rows = COPIES[name][1]
    for rank, found in enumerate(ranks4(of_one_value, name)):
        at = rows(rank)
        mine = slice(None) if at is None else slice(2 * at, 2 * at + 2)
        assert torch.equal(found[mine], wanted[mine] / times)
