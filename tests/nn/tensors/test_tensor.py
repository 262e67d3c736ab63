"""A global tensor is a torch.Tensor to whoever looks at it: numbers, attributes, conversions, errors."""

# mypy: disallow-untyped-calls=False

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.eager import dispatch
from sbpflow.sbp.layout import _interned
from tests.nn.either import LINE, Maker, X, Y, differs

ARITHMETIC = """
x+1 | 1+x | x*2j | 2-x | 2/x | x//2 | 7%x | x**2 | 2**x | -x | abs(x) | ~(x>0) | x@y.T | x+p | p+x | p@x.T | p-x | p/x
p**x | x<p | p<x | x==p | x==None | x!=None | x=='a' | i+x | i+1.5 | i/2 | i//2 | i%3 | b+1 | x+f | f+x | f+d0 | d0+f
i+d0 | h+x | h+d0 | i+True | torch.add(x,1,alpha=2) | torch.sub(p,x,alpha=2) | x+np.float64(2) | np.float64(2)*x
torch.maximum(p,x) | torch.where(x>0,p,x) | torch.where(x>0,1,0) | torch.cat([x,p]) | torch.stack([p,x]) | F.linear(p,x)
x.masked_fill(p>0,0) | x[p>0] | p[x>0] | p[:,i] | x[i0] | p[i0] | c.real | c.H | c.abs() | x.to(f) | x.half() | x.long()
torch.result_type(x,f) | torch.result_type(i,1.5) | torch.result_type(i,d0) | sum([x,y]) | sum(x) | max([s,s*2])
""".replace("\n", "|")
READING = """
bool(s) | bool(x) | int(s) | float(s) | complex(s) | len(x) | len(s) | list(x) | [*s] | s.item() | x.item() | x.tolist()
[10,20,30][i0] | list(range(i0)) | 1. in x | s in x | x in [x] | x.T | x.mT | x.real | x.shape | x.size(-1) | x.size(5)
x.dim() | x.ndim | x.numel() | x.stride() | x.element_size() | x.nbytes | x.is_contiguous() | i.is_floating_point()
c.is_complex() | x.dtype | x.device | x.layout | x.requires_grad | x.is_leaf | x.grad_fn | x.grad | (g*2).is_leaf
(g*2).grad_fn is None | x.is_cuda | x.is_sparse | x.is_inference() | torch.is_tensor(x) | isinstance(x,torch.Tensor)
hash(x)==hash(x) | {x:1}[x] | len({x,y,x}) | sorted([s,s*2,s-1],key=float) | any(x[0]>0) | x.to(x.dtype) is x
x.cpu() is x | x.contiguous() is x | x.clone() is x | torch.equal(x,p) | torch.allclose(p,x) | f'{s:.3f}' | '%.2f'%s
g.numpy() | (g*2).numpy() | g.detach().tolist() | torch.is_nonzero(s) | x.new_zeros(2) | torch.zeros_like(x)
""".replace("\n", "|")
WRONG = """
x.reshape(5,5) | x.view(5,5) | x@y | x+y[:3] | torch.cat([x,y[:,:3]]) | x.sum(7) | F.linear(x,y.T) | x.squeeze(9)
torch.stack([x,y[0]]) | x.expand(3,3) | x.transpose(0,5) | x.permute(0) | x.gather(0,x) | x[10] | x[:,10] | x['a']
x[0,0,0] | x[1.5] | torch.add(x) | x.foo | torch.relu(x,y) | F.softmax(x,dim=3) | iter(s) | i.mean() | x.numpy(1)
""".replace("\n", "|")


def names(make: Maker) -> dict[str, Any]:
    values = {
        "x": X, "y": Y, "i": torch.tensor([2, 0]), "b": torch.tensor([True, False]), "f": X.float(), "h": X.half(),
        "d0": torch.tensor(2.0, dtype=torch.float64), "s": torch.tensor(0.75), "c": torch.complex(X, Y),
        "i0": torch.tensor(2),
    }  # fmt: skip
    made = {name: make(value) for name, value in values.items()}
    return {**made, "g": make(X, True), "p": Y * 2, "torch": torch, "np": np, "F": F}


@pytest.mark.parametrize("said", [e.strip() for e in ARITHMETIC.split("|") if e.strip()])
def test_arithmetic_and_types_are_those_of_one_tensor(said: str) -> None:
    assert not differs(lambda make: eval(said, names(make)))


@pytest.mark.parametrize("said", [e.strip() for e in READING.split("|") if e.strip()])
def test_what_is_read_is_that_of_one_tensor(said: str) -> None:
    assert not differs(lambda make: eval(said, names(make)))


@pytest.mark.parametrize("said", [e.strip() for e in WRONG.split("|") if e.strip()])
def test_what_is_wrong_is_the_same_error(said: str) -> None:
    assert not differs(lambda make: eval(said, names(make)))


def test_numpy_sees_the_whole_value() -> None:
    for x in (flow.tensor(X, placement=LINE, sbp=sbp) for sbp in (B, S(0), S(1), flow.P)):
        assert np.array_equal(np.asarray(x), X.numpy())


def test_text_says_where_it_lies_and_what_it_came_from() -> None:
    x = flow.tensor(X, placement=LINE, sbp=S(0), requires_grad=True)
    assert "sbp=(S(0),)" in repr(x)
    assert "requires_grad=True" in str(x)
    assert "grad_fn=<MulBackward0>" in f"{[x * 2]}"


def test_a_moved_tensor_shares_nothing_with_another() -> None:
    for make in (Maker(name) for name in ("B", "S(0)", "P")):
        x: Any = make(X)
        x @ Y.T  # some op may have moved it already
        one, two = x.to_global(sbp=S(1)), x.to_global(sbp=S(1))
        one.add_(1)
        x.mul_(2)
        assert torch.allclose(two.full_tensor(), X)
        assert torch.allclose(one.full_tensor(), X + 1)


def test_tensors_of_different_placements_do_not_meet() -> None:
    other = flow.placement("cpu", range(2))
    with pytest.raises(flow.SbpflowError, match="different placements"):
        flow.tensor(X, placement=LINE, sbp=B) + flow.tensor(X, placement=other, sbp=B)


def test_a_plain_weight_that_trains_does_not_meet_a_global_tensor() -> None:
    with pytest.raises(flow.SbpflowError, match="plain one that requires grad"):
        F.linear(flow.tensor(X, placement=LINE, sbp=B), nn.Parameter(X))


@pytest.mark.parametrize("how", ["type_as", "expand_as", "view_as", "reshape_as"])
def test_a_plain_weight_may_be_looked_at(how: str) -> None:
    """No gradient would go there, and it was refused for that."""
    weight = nn.Parameter(X.double())
    found = getattr(flow.tensor(X, placement=LINE, sbp=S(0)), how)(weight)
    want = getattr(X, how)(weight)
    assert found.dtype is want.dtype
    assert torch.equal(found.full_tensor(), want)


@pytest.mark.parametrize("bad", ["global twice", "dim out of range", "pieces of the wrong shape", "too few pieces"])
def test_what_cannot_be_made_is_an_error(bad: str) -> None:
    tries = {
        "global twice": lambda: flow.tensor(flow.tensor(X, placement=LINE, sbp=B), placement=LINE, sbp=B),
        "dim out of range": lambda: flow.tensor(X, placement=LINE, sbp=S(2)),
        "pieces of the wrong shape": lambda: flow.from_local([X, X, X, X[:, :3]], placement=LINE, sbp=B),
        "too few pieces": lambda: flow.from_local([X, X], placement=LINE, sbp=S(0)),
    }
    with pytest.raises(flow.SbpflowError):
        tries[bad]()


def test_python_functions_of_elements_see_the_values() -> None:
    def law(make: Maker) -> Tensor:
        return make(X).apply_(lambda v: v * 2).map_(make(Y), lambda a, b: a + b)

    assert not differs(law)


class Pair(NamedTuple):
    one: Tensor
    two: Tensor


class Bag(list[Tensor]):
    pass


@pytest.mark.parametrize("kind", [Pair, lambda *x: Bag(x)], ids=["named_tuple", "own_list"])
def test_tensors_in_a_tuple_or_list_of_ones_own_class_go_together_at_every_call(kind: Callable[..., Any]) -> None:
    """The first call makes a recipe, the next take it: also with layouts and sizes that it was not made for."""
    p = flow.placement("cpu", range(4))
    for sbp in (S(0), S(0), B, S(1), P):
        for rows in (8, 8, 5):
            whole = [torch.arange(rows * 2.0).reshape(rows, 2) + n for n in range(2)]
            parts = [flow.tensor(x, placement=p, sbp=sbp) for x in whole]
            for join in (torch.stack, torch.cat):
                got = join(kind(*parts))
                assert isinstance(got, flow.GlobalTensor)
                assert torch.equal(got.full_tensor(), join(whole))


def test_what_is_remembered_of_shapes_that_come_and_go_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes hold layouts, layouts hold plans; a program of ever new lengths must not fill the memory."""
    monkeypatch.setattr(dispatch, "_MOST", 40)
    p = flow.placement("cpu", range(2))

    def rows(lengths: range) -> int:
        for n in lengths:
            x = flow.ones(n, 2, placement=p, sbp=S(0))
            torch.relu(x.to_global(sbp=B)) + 1
        del x
        gc.collect()
        return sum(of.placement is p for of in list(_interned.values()))

    few, many = rows(range(1000, 1060)), rows(range(2000, 2400))
    assert many <= few + 3 * 40


def test_a_size_may_be_a_plain_tensor_of_one_number() -> None:
    x = flow.tensor(torch.arange(24.0).reshape(4, 6), placement=flow.placement("cpu", range(2)), sbp=S(0))
    half: Any = torch.div(6, 2, rounding_mode="trunc")
    assert x.view(4, half, 2).shape == x.reshape(4, half, -1).shape == (4, 3, 2)
    assert x.new_full((2, half), 7.0).shape == (2, 3)


@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["data asked each time", "data kept"])
def test_what_is_written_to_data_is_seen_though_a_graph_keeps_what_was_moved(sbp: Any, kept: bool) -> None:
    """A loss of the step before lives until the next one, and with it the weights that were gathered for it."""
    weight: Any = flow.tensor(torch.arange(8.0).reshape(4, 2), placement=LINE, sbp=sbp).requires_grad_()
    x = flow.tensor(torch.ones(8, 2), placement=LINE, sbp=S(0))
    lasts, data = F.linear(x, weight), weight.data
    for write in (
        lambda w: w.mul_(10),
        lambda w: w[1].fill_(7),
        lambda w: w.__setitem__(0, 9.0),
        lambda w: w.t().add_(1),
    ):
        write(data if kept else weight.data)
        found: Any = F.linear(x, weight)
        wanted = F.linear(torch.ones(8, 2), weight.detach().full_tensor())
        assert torch.equal(found.full_tensor(), wanted)
        lasts = lasts + found
    lasts.sum().backward()  # torch does not refuse either
    assert data._shards[0]._version == weight.data._shards[0]._version >= 4
    assert weight._shards[0]._version == 0
