"""torch.autograd.Function in graphs: its own backward is what runs, on pieces where these are seen to be enough."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.graph.capture.own_backward import OwnOp
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.call import Call
from tests.nn.graph.alike import GRID, LINE, WHERE, batch, net, trains_alike

# mypy: disable-error-code="no-untyped-call,no-any-return"


class Scaled(Function):
    """A square with a factor that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x * x * k

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * g * x * ctx.k, None


class Clipped(Function):
    """The identity, whose gradient is not the derivative, nor linear; it returns what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.clamp(-0.01, 0.01)


class Normed(Function):
    """An RMS norm: its rows may be split, its columns not; the weight's gradient is a sum of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, r)
        return x * r * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, r = ctx.saved_tensors
        n, h = x * r, g * w
        return (h - n * (h * n).mean(-1, keepdim=True)) * r, (g * n).sum(0)


class Scattered(Function):
    """Its backward adds in place, by numbers of columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(x, at)
        return x.gather(-1, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, at = ctx.saved_tensors
        above = x.mul(0.1)
        above.scatter_add_(-1, at, grad)
        return above, None


class Two(Function):
    """Written the newer way, with a second result that has no gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x @ y, x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return g @ y.mT, x.mT @ g


class Whole(Function):
    """A loss: a mean, whose count is no part of the ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        p = x.softmax(-1)
        ctx.save_for_backward(p, y)
        return -p.gather(1, y[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        p, y = ctx.saved_tensors
        return g * (p - F.one_hot(y, p.shape[1])) / len(y), None


class Numpy(Function):
    """Something that no tracer sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.numpy()))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * torch.from_numpy(np.cos(ctx.saved_tensors[0].numpy()))


class Branching(Function):
    """It goes by what it holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 3 if x.sum() > 0 else x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 3 if ctx.saved_tensors[0].sum() > 0 else g * 2


class Net(nn.Module):
    """Whose hidden layer goes through one of them."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.net, self.through = net(), through
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8).double())

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[0](x)
        out = {
            "Scaled": lambda: Scaled.apply(Scaled.apply(h, 0.5), 2.0),
            "Clipped": lambda: Clipped.apply(h) * 3,
            "Normed": lambda: Normed.apply(h, self.gain),
            "Two": lambda: Two.apply(h, torch.diag(self.gain))[0],
            "Numpy": lambda: Numpy.apply(h),
            "Branching": lambda: Branching.apply(h),
        }[self.through]()
        return self.net[2](out)


@pytest.mark.sampled(3)
@WHERE
@pytest.mark.parametrize("through", ["Scaled", "Clipped", "Normed", "Two", "Numpy", "Branching"])
def test_a_function_with_its_own_backward(through: str, where: flow.Placement) -> None:
    trains_alike(Net(through), where, steps=2)


def test_in_micro_batches() -> None:
    trains_alike(Net("Normed"), LINE, steps=2, micro_batches=2)
    with pytest.raises(SbpError, match=r"Numpy at .*test_own_backward\.py:\d+ needs more than one micro-batch"):
        trains_alike(Net("Numpy"), LINE, steps=1, micro_batches=2)


def test_a_loss_of_its_own() -> None:
    trains_alike(net(), GRID, loss=lambda model, x, y: Whole.apply(model(x), y), steps=2)


def split(cls: type[Function], *args: Any) -> Any:
    op = OwnOp(cls, args, 1)
    found = op.answer(Call(op, args, {}, ()))  # type: ignore[arg-type]
    return None if found is None else (found.inputs, found.outputs)


def test_which_dims_may_be_split_is_read_off_what_is_called() -> None:
    x = torch.ones(4, 6)
    assert split(Scaled, x, 2.0) == (((0, 1),), ((0, 1),))
    assert split(Normed, x, x[0]) == (((0, -1), (-1,)), ((0, -1),))
    assert split(Scattered, x, torch.zeros(4, 1, dtype=torch.long)) == (((0, -1), (0, -1)), ((0, -1),))
    assert split(Two, x, x.mT) == (((0, -1), (-1, -1)), ((0, -1), (0, -1)))
    assert split(Whole, x, torch.zeros(4, dtype=torch.long)) is split(Numpy, x) is split(Branching, x) is None


def test_a_split_batch_stays_split() -> None:
    """An opaque op would gather it."""
    step = flow.compile(Net("Scaled"), placement=LINE)
    step.plan_for(flow.tensor(batch(64)[0], placement=LINE, sbp=flow.S(0)))
    own = [op for op in step.physical.steps if "Scaled" in str(getattr(op, "op", ""))]
    assert [op.outputs[0].layout.sbp for op in own] == [(flow.S(0),)] * 2


@pytest.mark.parametrize(
    ("name", "said"), [("writes", "writes to what it is given"), ("draws", "draws random numbers")]
)
def test_what_a_function_may_not_do(name: str, said: str) -> None:
    class Bad(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if name == "draws":
                return x * torch.rand_like(x)
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g * 2

    with pytest.raises(
        SbpError, match=rf"Bad has a backward of its own and {said}, at .*test_own_backward\.py:\d+\n  "
    ):
        flow.compile(net(), lambda model, x, y: Bad.apply(model(x) * 1).sum(), placement=LINE)(*batch())


def test_why_a_function_runs_whole_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.never_set

    model = nn.Linear(4, 4)
    flow.nn.to_global(model, LINE)
    step = flow.compile(model, lambda m, x: Odd.apply(m(x)).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level("INFO", logger="sbpflow"), pytest.raises(Exception, match="never_set"):
        step(flow.ones(4, 4, placement=LINE, sbp=S(0)))
    told = [record for record in caplog.records if "Odd runs whole" in record.message]
    assert told
    assert "never_set" in str(told[0].exc_info)
