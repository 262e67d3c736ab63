"""Views and copies: those of one device are those of global tensors, as writes to them show.

The strides of the whole tensor decide. A piece may lie otherwise: one row of a transposed tensor is contiguous.
"""

# mypy: disallow-untyped-calls=False

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.tensors.memory_formats import is_in_order
from sbpflow.sbp import Sbp

TWO, THREE = flow.placement("cpu", range(2)), flow.placement("cpu", range(3))
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
LIES: list[tuple[flow.Placement, Any]] = [
    (TWO, B), (TWO, S(0)), (TWO, S(1)), (TWO, S(2)), (TWO, P), (THREE, S(0)), (THREE, S(1)), (GRID, (S(0), S(1))),
    (GRID, (S(1), S(1))),
]  # fmt: skip
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t.clone(),
    "transposed": lambda t: t.mT.contiguous().mT,
    "channels_last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
}
SHAPES = [(3, 4, 2, 6), (3, 4, 2), (3, 4), (1, 4, 2, 6)]
SOURCES = ["x", "x * 1", "x[1:]", "x[..., 1:]", "x.transpose(0, 1)"]
OPS = """
x.contiguous() | x.contiguous(memory_format=torch.channels_last) | x.reshape(-1) | x.reshape(3,-1) | x.reshape(12,-1)
x.reshape(*x.shape) | x.reshape(*x.shape[:2],-1) | x.flatten() | x.flatten(1) | x.flatten(0,1) | x.flatten(2)
x.ravel() | x.view(-1) | x.view(12,-1) | x.view_as(x) | x.reshape_as(x) | x.view(torch.int64) | x.unflatten(1,(2,2))
x.to(memory_format=torch.channels_last) | x.to(x.dtype) | x.to(x.dtype,copy=True) | x.to(x) | x.type(x.dtype)
x.double() | x.cpu() | x.type_as(x) | x.expand(*x.shape) | x.expand_as(x) | x.broadcast_to(x.shape) | x.squeeze()
x.unsqueeze(1) | x.narrow(1,1,2) | x.chunk(2,1)[1] | x.split(1,0)[1] | x.unbind(1)[2] | x.diagonal() | x.movedim(0,-1)
x.moveaxis(1,0) | x.swapaxes(0,1) | x.mT | x.permute(*range(x.ndim)[::-1]) | x[0] | x[:,1] | x[::2] | x[:,::2] | x[None]
x[...] | x[:] | x[[0,1]] | x[torch.tensor([1,0])] | x[x>0] | x.real | torch.view_as_real(torch.complex(x,x))
torch.complex(x,x).imag | torch.atleast_1d(x) | torch.atleast_3d(x) | x.float() | x.detach() | x.data | x.clone()
torch.ops.aten.alias(x) | x.unfold(1,2,2) | torch.nn.Flatten()(x) | F.dropout(x,0.) | F.dropout(x,.5,False)
F.alpha_dropout(x,.5,False) | torch.feature_dropout(x,.5,False) | torch.nn.Identity()(x) | x.positive()
x.resolve_conj() | x.conj() | x.tile(1) | torch.cat([x]) | torch.stack([x])[0]
torch.squeeze_copy(x) | torch.narrow_copy(x,1,1,2)
torch.tensor_split(x,2,1)[1] | x.flip(0) | x.roll(0) | x.rot90(4) | x.adjoint() | x.sum_to_size(*x.shape)
torch.broadcast_tensors(x,x)[0] | F.pad(x,(0,0)) | F.pad(x,(0,-1)) | torch.einsum('...ij->...ji',x) | x.mT.contiguous()
x.mT.flatten() | x.mT.reshape(-1) | x.transpose(0,1).contiguous() | x.transpose(0,1).flatten() | x[1:].contiguous()
x[1:].flatten() | x[:,:1].contiguous() | x[:1].mT.contiguous() | x[0].contiguous() | x[:,0].reshape(-1)
x.movedim(1,-1).flatten(1,2) | x.movedim(1,-1).contiguous() | x.expand(1,*x.shape).contiguous()
x.as_strided((3,),(2,)) | x.as_strided(x.shape,x.stride()) | x.as_strided((2,2),(3,2),1)
torch.as_strided_copy(x,(3,),(2,)) | torch.as_strided_scatter(x,x[0],x[0].shape,x[0].stride(),1)
x.where(x>-99,x)
""".replace("\n", "|")


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split("|") if part.strip()]


def written(x: Tensor, source: str, op: str, write: str) -> list[Tensor]:
    """The tensor, a source made of it and a result of this, once one of them was written to."""
    base, env = x, {"torch": torch, "F": F}
    x = eval(source, {"x": x})
    y = eval(op, {**env, "x": x})
    for target, factor in zip((y, x, base) if write == "all" else ({"y": y, "x": x}[write],), (2, 3, 5), strict=False):
        target.mul_(factor)
    return [t.clone() for t in (base, x, y)]


def in_a_graph(x: Tensor, *program: str) -> list[Tensor]:
    """The same of a copy of the tensor, in a compiled step."""
    assert isinstance(x, flow.GlobalTensor)
    with torch.no_grad():
        step = flow.compile(torch.nn.Identity(), lambda _, x: written(x * 1, *program), None, placement=x.placement)
        found: list[Tensor] = step(x)
    return found


def answer(run: Callable[..., list[Tensor]], x: Tensor, *program: str) -> Any:
    """The values that come of it, or how it is refused."""
    try:
        return [t.full_tensor() if isinstance(t, flow.GlobalTensor) else t for t in run(x, *program)]
    except flow.SbpflowError as error:
        return "told" if re.search("as_strided|has no inverse here|needs to know", str(error)) else error
    except (RuntimeError, ValueError, IndexError, NotImplementedError):
        return "refused"


def same(found: Any, wanted: Any) -> bool:
    if isinstance(found, list) and isinstance(wanted, list):
        return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return isinstance(found, str) and found in ("told", wanted)


def otherwise(op: str, count: int, run: Callable[..., Any] = written) -> list[Any]:
    """Drawn cases in which a write shows elsewhere than on one device."""
    rng, found = random.Random(op), []
    for _ in range(count):
        order, shape, source = rng.choice([*ORDERS]), rng.choice(SHAPES), rng.choice(SOURCES)
        (where, lie), write = rng.choice(LIES), rng.choice(["x", "y", "all"])
        if lie is not B and "int64" in op:  # a sum has no negative zeros, and views that were moved may be one
            continue
        value = ORDERS[order]((torch.arange(torch.Size(shape).numel(), dtype=torch.float64) - 5).reshape(shape))
        sbp = tuple(
            B if str(e) == "S(2)" and len(shape) < 3 else e for e in (lie if isinstance(lie, tuple) else (lie,))
        )
        wanted = answer(written, value.clone(), source, op, write)
        got = answer(run, flow.tensor(value, placement=where, sbp=sbp), source, op, write)
        if not same(got, wanted):
            found.append((op, source, order, shape, sbp, where.size, write, got, wanted))
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("op", listed(OPS))
def test_writing_shows_where_it_shows_on_one_device(op: str) -> None:
    assert not otherwise(op, 12)


@pytest.mark.sweep
@pytest.mark.parametrize("op", listed(OPS))
def test_writing_shows_there_in_many_more_cases(op: str) -> None:
    assert not otherwise(op, 400)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("lie", [B, S(0), S(1)], ids=str)
@pytest.mark.parametrize("order", ["rows", "transposed", "channels_last"])
def test_results_of_graphs_lie_in_memory_as_they_say(order: str, lie: Sbp, pieces: int) -> None:
    x = flow.tensor(torch.ones(4, 4, 2, 3), placement=TWO, sbp=lie)
    step = flow.compile(
        torch.nn.Identity(), lambda _, x: ORDERS[order](x * 2), None, placement=TWO, micro_batches=pieces
    )
    with torch.no_grad():
        y = step(x)
    assert pieces > 1 or y.stride() == ORDERS[order](torch.ones(4, 4, 2, 3)).stride()
    one = torch.empty_strided(y.shape, y.stride()).fill_(2)
    for each in (y, one):
        each.mT.contiguous().zero_()
    assert torch.equal(y.full_tensor(), one)


IN_GRAPHS = [op for op in listed(OPS) if "as_strided" not in op]  # which counts in the memory of a capture


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", IN_GRAPHS)
def test_writing_in_a_graph_shows_where_it_shows_on_one_device(op: str) -> None:
    assert not otherwise(op, 2, in_a_graph)


@pytest.mark.sweep
@pytest.mark.parametrize("op", IN_GRAPHS)
def test_writing_in_a_graph_shows_there_in_many_more_cases(op: str) -> None:
    assert not otherwise(op, 15, in_a_graph)


@pytest.mark.parametrize("copy", ["contiguous", "flatten", "ravel"])
def test_a_row_of_a_transposed_tensor_is_copied_too(copy: str) -> None:
    x = flow.tensor(torch.arange(12.0).reshape(3, 4), placement=TWO, sbp=S(0))
    getattr(x.T, copy)().zero_()
    assert float(x.sum()) == 66


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("lie", [B, S(0), S(1), S(3)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_lie_in_memory_as_on_one_device(order: str, lie: Sbp) -> None:
    value = ORDERS[order](torch.ones(4, 3, 2, 2))
    for kept in ORDERS.values():
        plain, ours = value.clone().requires_grad_(), flow.tensor(value, placement=TWO, sbp=lie, requires_grad=True)
        assert list(map(tuple, strides_of_gradients(plain, kept))) == list(strides_of_gradients(ours, kept))
        assert isinstance(ours.grad, flow.GlobalTensor)
        assert all(is_in_order(piece, ours.grad._layout) for piece in ours.grad._shards)


def strides_of_gradients(w: Tensor, kept: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    """Those of new gradients, of those that were added up, and of those that were added to another one."""
    for _ in range(2):
        for _ in range(2):
            (w * w).sum().backward()
            assert w.grad is not None
            yield w.grad.stride()
        w.grad = kept(w.grad)  # type: ignore[arg-type]


def test_gradients_of_what_is_no_leaf_lie_as_they_say() -> None:
    x = flow.tensor(torch.ones(3, 4), placement=TWO, sbp=S(0), requires_grad=True)
    found: list[Tensor] = []
    y = x * 2
    y.retain_grad()
    y.register_hook(found.append)
    (y.T * torch.ones(4, 3)).sum().backward()
    for g in (*found, y.grad, *torch.autograd.grad(((z := x * 2).T * torch.ones(4, 3)).sum(), z)):
        assert isinstance(g, flow.GlobalTensor)
        assert all(is_in_order(piece, g._layout) for piece in g._shards)


def test_pieces_of_another_memory_order_are_another_layout() -> None:
    for lies in (ORDERS["rows"], ORDERS["transposed"], ORDERS["rows"], lambda t: torch.cat([t, t], 1)[:, ::2]):
        value = torch.arange(1.0, 7).reshape(2, 3)
        x = flow.from_local([lies(value), lies(value)], placement=TWO, sbp=S(0))
        one = lies(torch.cat([value, value]))
        x.T.contiguous().zero_()
        one.T.contiguous().zero_()
        assert float(x.sum()) == float(one.sum())


def test_as_strided_scatter_has_the_gradient_that_torch_has() -> None:
    plain, value = torch.arange(12.0, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    pair = (
        (plain, value),
        tuple(flow.tensor(t.detach(), placement=TWO, sbp=S(0)).requires_grad_() for t in (plain, value)),
    )
    for x, y in pair:
        torch.as_strided_scatter(x * 1, y, (2, 2), (3, 2), 1).square().sum().backward()
    for one, ours in zip(*pair, strict=True):
        assert isinstance(ours.grad, flow.GlobalTensor)
        assert one.grad is not None
        assert torch.equal(one.grad, ours.grad.full_tensor())


def test_a_view_that_torch_refuses_is_refused() -> None:
    value = ORDERS["channels_last"](torch.ones(1, 4, 2, 6))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        flow.tensor(value, placement=TWO, sbp=S(0)).transpose(0, 1).view(-1)


def test_what_is_gathered_keeps_its_memory_order() -> None:
    x = flow.tensor(torch.ones(3, 4).T, placement=TWO, sbp=S(0))
    assert x.full_tensor().stride() == x.to_global(sbp=B).stride() == (1, 4)


@pytest.mark.parametrize("view", ["x[:, ::2].as_strided((2,), (2,))", "x[1:].as_strided((2,), (1,), 0)"])
def test_as_strided_is_refused_where_memory_is_not_known(view: str) -> None:
    x = flow.tensor(torch.arange(12.0).reshape(3, 4), placement=TWO, sbp=S(0))
    with pytest.raises(flow.SbpflowError, match=r"as_strided\(size=.* of a view"):
        eval(view, {"x": x})
