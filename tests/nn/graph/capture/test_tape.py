"""The tape against autograd's own in-place ops and views: values, gradients and buffers must come out the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.capture.inplace import storage_of
from sbpflow.placement.errors import SbpError
from tests.nn.graph.same import Of, ops_of, same, traced

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def plain(s: Any, x: Tensor) -> Any:
    h: Tensor = (x @ s.w).neg_().add_(1).mul_(x)
    return h.sum()


def rows(s: Any, x: Tensor) -> Any:
    h = x @ s.w
    h[0] = 1.0
    h[:, 1] *= 2
    h[1:3, ::2] += x[:2, :2]
    return h.pow(2).sum()


def reshaped(s: Any, x: Tensor) -> Any:
    h = x @ s.w
    v, t = h.view(2, 8), h.t()
    v.add_(1)
    t[1:3].mul_(3)
    h.mul_(0.5)
    h.unsqueeze(0)[0, 2, ::2] = x[0, :2]
    return (h * t).sum() + v.sum()


def stale(s: Any, x: Tensor) -> Any:
    """A view taken before, its base written to, then the view read and written."""
    h = x @ s.w
    a, b = h.narrow(0, 0, 2), h.transpose(0, 1).reshape(4, 2, 2).select(1, 1)
    h.add_(s.w)
    a.add_(h[2:])
    return (h.sum() + a.pow(2).sum()) * b.sum()


def diagonals(s: Any, x: Tensor) -> Any:
    y = x.clone()
    y.diagonal().fill_(7.0)
    y.permute(1, 0)[0] = s.w[1]
    y[y > 0.5] = 0
    y.masked_fill_(x < 0, 3.0)
    y.index_put_((torch.tensor([0, 1]),), s.w[2:])
    return y.sum() + y[1].prod()


def unbound(s: Any, x: Tensor) -> Any:
    y = x.clone()
    for row in y.unbind(0):
        row.add_(row.sum())
    for k, part in enumerate(torch.split(y, [1, 3], 1)):
        part.mul_(k + 1)
    for part in y.chunk(2):
        part.copy_(x[:1])
    return (y @ s.w).sum()


def metadata(s: Any, x: Tensor) -> Any:
    h = x @ s.w
    h.t_().unsqueeze_(0).transpose_(1, 2)
    h.div_(2)
    return h.squeeze_()[0, 1:].sum()


def dtypes(s: Any, x: Tensor) -> Any:
    y, z, b = x.double(), torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 4)
    y.add_(x)
    z.add_(x)
    b.eq_(x).logical_not_()
    i = torch.arange(4)
    i &= 3
    return (y.float() @ s.w + z + b).sum() + i.clamp_(max=2).sum()


def outs(s: Any, x: Tensor) -> Any:
    given, grown = torch.empty(4, 4), torch.empty(0)
    torch.mul(x, 2, out=given)
    torch.add(x, given, out=grown)
    return (given @ s.w + grown).sum()


def random(s: Any, x: Tensor) -> Any:
    y = torch.empty(4, 4).uniform_(0, 1)
    z = torch.empty(4, 4).bernoulli_(0.5)
    return ((x + y) @ s.w * z.normal_()).sum() + F.dropout(x + torch.rand(4), inplace=True).sum()


def cut(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        k = (x @ s.w).sum()
        same = s.w.view(4, 4)
    return (x @ s.w).sum() * k + (x @ s.w.detach()).sum() + (x @ s.w.data).mean() + (s.w * same).sum()


def given(s: Any, x: Tensor) -> Any:
    x.add_(1)
    return (x @ s.w).sum()


def nowhere(s: Any, x: Tensor) -> Any:
    """Windows that are as large as the image leave no place between them."""
    h = x @ s.w
    h[0:-4, 1:3] = 5.0
    h[:, 4:].mul_(2)
    return h.pow(2).sum()


BODIES = [nowhere, plain, rows, reshaped, stale, diagonals, unbound, metadata, dtypes, outs, random, cut, given]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_writing_in_place_is_the_same_as_making_anew(body: Callable[..., Tensor]) -> None:
    same(Of(body), X)


def test_views_that_nobody_wrote_to_are_taken_once() -> None:
    def body(s: Any, x: Tensor) -> Any:
        v = s.w.view(16)
        return (v + x.view(16)).sum() * v.sum()

    assert ops_of(same(Of(body), X)).count("view") == 2


def test_what_changes_nothing_is_no_op() -> None:
    def body(s: Any, x: Tensor) -> Any:
        return (
            x.contiguous().view(4, 4)[:].expand(4, 4).to(torch.float32).detach() @ F.dropout(s.w, training=False)
        ).sum()

    assert ops_of(same(Of(body), X)) == ["matmul", "sum"]


def test_ops_that_nothing_uses_are_left_out() -> None:
    def body(s: Any, x: Tensor) -> Any:
        h = x @ s.w
        h.mul(3).add_(1).relu()
        return h.sum()

    assert ops_of(same(Of(body), X)) == ["matmul", "sum"]


def test_detached_values_have_no_gradient() -> None:
    def body(s: Any, x: Tensor) -> Any:
        return (s.w.detach() * s.w).sum()

    logical = same(Of(body), X)
    detach = next(op for op in logical.ops if op.op is torch.ops.aten.detach.default)
    assert not detach.grad
    assert detach.numbers[0] not in logical.wants_grad


def test_buffers_that_are_written_or_assigned_are_told() -> None:
    def body(s: Any, x: Tensor) -> Any:
        s.n += 1
        s.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        s.mean[0] = 5
        s.scale = s.scale * 0.5 + x.sum()
        return ((x - s.mean + s.kept) @ s.w).sum() * s.n * s.scale

    start = {"n": torch.tensor(0), "mean": torch.zeros(4), "scale": torch.tensor(1.0), "kept": torch.ones(4)}
    assert set(same(Of(body, **start), X).writes) == {"n", "mean", "scale"}


NORMS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.BatchNorm1d(4), (6, 4)),
    (nn.BatchNorm1d(4, momentum=0.3, affine=False), (3, 4, 5)),
    (nn.BatchNorm2d(4), (3, 4, 5, 2)),
    (nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 5, 2)),
    (nn.InstanceNorm1d(4, track_running_stats=True), (3, 4, 5)),
    (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 2)),
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=[f"{type(m).__name__}-{s}" for m, s in NORMS])
def test_running_statistics_are_ops_of_their_own(norm: nn.Module, shape: tuple[int, ...], training: bool) -> None:
    logical = same(norm.train(training), torch.randn(shape))
    for op in logical.ops:
        if op.op in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default) and training:
            assert op.args[3] is None
    tracked = [n for n, _ in norm.named_buffers()]
    expected = tracked if training else []
    if isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d):
        expected = [n for n in expected if n != "num_batches_tracked"]  # torch does not count there
    assert sorted(logical.writes) == sorted(expected)


def behind(s: Any, x: Tensor) -> Any:
    h = x @ s.w
    with torch.no_grad():
        h[0].mul_(2)
    return h.sum()


def parameter(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        s.w.mul_(2)
    return (x @ s.w).sum()


def through_data(s: Any, x: Tensor) -> Any:
    s.w.data[0].zero_()
    return (x @ s.w).sum()


def expanded(s: Any, x: Tensor) -> Any:
    x.clone()[:, :1].as_strided((2, 2), (4, 1)).mul_(2)
    return (x @ s.w).sum()


def replaced(s: Any, x: Tensor) -> Any:
    x.data = x * 2
    return (x @ s.w).sum()


def sparse(s: Any, x: Tensor) -> Any:
    return torch.sparse.mm(x.to_sparse(), s.w).sum()


@torch.library.custom_op("sbpflow_tests::seen", mutates_args=())
def seen(x: Tensor) -> None:
    raise RuntimeError("it has values")


@seen.register_fake
def _(x: Tensor) -> None:
    return


WITHOUT_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a check": lambda x: torch._assert_async(x.sum() < 0),
    "parts of nothing": lambda x: x[:0].unbind(),
    "an op of one's own": lambda x: seen(x),
}


@pytest.mark.filterwarnings("ignore:.*the graph leaves it out")
@pytest.mark.parametrize("name", WITHOUT_RESULTS)
def test_ops_without_results_are_no_part_of_a_step(name: str) -> None:
    def body(model: nn.Linear, x: Tensor) -> Any:
        y = model(x)
        WITHOUT_RESULTS[name](y)
        return y.square().sum()

    model = nn.Linear(4, 4)
    wanted = model(X).square().sum().detach()
    step = flow.compile(model, body, torch.optim.SGD(model.parameters(), 0.1), placement=flow.placement("cpu", [0]))
    torch.testing.assert_close(step(X).full_tensor(), wanted)
    assert all(op.outputs for op in step.planned.graph.steps)


def test_an_op_of_ones_own_that_a_graph_leaves_out_is_told_with_the_line() -> None:
    with pytest.warns(UserWarning, match=r"sbpflow_tests.seen.* leaves it out, at .*test_tape.py:\d+"):
        traced(Of(lambda s, x: (seen(x), x.sum())[1]), X)


def test_memory_that_a_tensor_has_left_is_nobody_elses() -> None:
    """`x.data = y` frees what x lay in; what is made next lies there, and is not what x was."""

    def body(s: Any, x: Tensor) -> Any:
        gone = x * 2
        there, made = storage_of(gone), list[Tensor]()
        gone.data = x * 3
        while len(made) < 50 and there not in map(storage_of, made):
            made.append(x + 1)
        return (made[-1].data @ s.w).sum()

    same(Of(body), X)


REFUSED = [
    (behind, "behind autograd's back"),
    (parameter, "the parameter w is written to"),
    (through_data, "the parameter w is written to"),
    (expanded, "as_strided.default, which has no inverse"),
    (replaced, "the data of a tensor .* was replaced"),
    (sparse, "makes a sparse tensor"),
]


@pytest.mark.parametrize(("body", "told"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_writes_that_cannot_be_said_otherwise_are_refused_with_the_line(body: Callable[..., Any], told: str) -> None:
    with pytest.raises(SbpError, match=told) as caught:
        traced(Of(body), X)
    assert f"{__file__}:" in str(caught.value)
