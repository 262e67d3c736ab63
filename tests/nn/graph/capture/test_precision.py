"""A capture of cast modules computes what the same casts do by hand, and casts nothing else."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.graph.capture.trace import trace
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.logical import Logical
from tests.nn.graph.interpret import Ran, interpret

BF16, FP32 = torch.bfloat16, torch.float32


def ran(model: nn.Module, build: Callable[..., Any], *args: Any) -> tuple[Logical, Ran]:
    logical, constants = trace(build, args, {}, {"": model}, device=torch.get_default_device().type)
    return logical, interpret(logical, constants, {"": model}, *args)


def casts(logical: Logical) -> list[torch.dtype]:
    """The types that are cast to, in order."""
    return [op.args[1] for op in logical.ops if op.op is torch.ops.aten.to.dtype]


def by_hand(model: nn.Module) -> Any:
    """A copy whose weights are bf16."""
    return copy.deepcopy(model).to(BF16)


def parts_of(model: nn.Module) -> list[Any]:
    return list(model.children())


def test_a_cast_model_takes_and_gives_what_is_around_it() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    flow.nn.cast(model, {"*": "bf16"})
    x = torch.randn(5, 6)
    hand = by_hand(model)

    def build(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    logical, found = ran(model, build, x)
    loss = hand(x.to(BF16)).float().square().sum()
    loss.backward()
    assert casts(logical) == [BF16, FP32]
    assert torch.equal(found.result, loss)
    assert all(torch.equal(found.grads[name], p.grad) for name, p in hand.named_parameters())
    assert model[0].weight.dtype is FP32  # nothing ran yet


def test_a_norm_in_fp32_within_bf16_is_cast_in_and_out() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    flow.nn.cast(model, {"1": "fp32", "*": "bf16"})
    tokens = torch.randint(9, (3, 5))
    logical, found = ran(model, model, tokens)
    embed, norm, head = parts_of(model)
    x = F.embedding(tokens, embed.weight.to(BF16)).float()
    y = norm(x).to(BF16)
    assert casts(logical) == [FP32, BF16, FP32]  # numbers of tokens are not cast
    assert torch.equal(found.result, F.linear(y, head.weight.to(BF16), head.bias.to(BF16)).float())


def test_what_is_widened_between_two_cast_modules_is_not_rounded_again() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    flow.nn.cast(model, {"0": "bf16", "1": "bf16"})
    logical, found = ran(model, model, torch.randn(2, 6))
    assert casts(logical) == [BF16, FP32]
    assert found.result.dtype is FP32


class Doubled(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x * self.w


class Around(nn.Module):
    def __init__(self, inner: nn.Module, use: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.use = inner, use

    def forward(self, *args: Any) -> Any:
        return self.use(self.inner, *args)


def test_a_cast_module_that_writes_to_its_argument_writes_to_the_callers() -> None:
    model = Around(Doubled(), lambda inner, x: (inner(y := x + 0), y))
    flow.nn.cast(model, {"inner": "bf16"})
    x = torch.randn(3, 4)
    _, found = ran(model, model, x)
    inner: Any = model.inner
    assert torch.equal(found.result[1], (x.to(BF16) * 2).float())
    assert torch.equal(found.result[0], (x.to(BF16) * 2 * inner.w.to(BF16)).float())


def test_an_argument_that_is_passed_twice_is_cast_once_and_other_lists_may_change() -> None:
    class Notes(nn.Module):
        def forward(self, q: Tensor, k: Tensor, seen: list[Any]) -> Tensor:
            seen.append(q is k)
            return q + k

    seen: list[bool] = []
    model = Around(Notes(), lambda inner, x: inner(x, x, seen))
    flow.nn.cast(model, {"inner": "bf16"})
    logical, found = ran(model, model, x := torch.randn(3))
    assert (casts(logical), seen) == ([BF16, FP32], [True])
    assert torch.equal(found.result, (x.to(BF16) + x.to(BF16)).float())


def test_what_was_widened_and_then_written_to_is_cast_anew() -> None:
    model = Around(nn.Linear(4, 4), lambda inner, x: inner(inner(x).add_(1.0)))
    flow.nn.cast(model, {"inner": "bf16"})
    x = torch.randn(3, 4)
    _, found = ran(model, model, x)
    hand = by_hand(model.inner)
    assert torch.equal(found.result, hand((hand(x.to(BF16)).float() + 1).to(BF16)).float())


def test_a_list_that_a_cast_module_changes_is_an_error() -> None:
    class Appends(nn.Module):
        def forward(self, held: list[Tensor]) -> Tensor:
            held.append(held[0] * 2)
            return held[-1]

    model = Around(Appends(), lambda inner, x: inner([x]))
    flow.nn.cast(model, {"inner": "bf16"})
    with pytest.raises(SbpError, match="changes a list or object among its arguments"):
        ran(model, model, torch.randn(3))


def test_a_parameter_named_alone_rests_in_its_type_and_is_cast_where_it_is_used() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flow.nn.cast(model, {"0.weight": "bf16"})
    x = torch.randn(3, 4)
    logical, found = ran(model, model, x)
    assert [s.fake.dtype for s in logical.sources if s.name == "0.weight"] == [BF16]
    first: Any = model[0]
    assert torch.equal(found.result, model[1](F.linear(x, first.weight.to(BF16).float(), first.bias)))


def test_weights_are_cast_to_what_uses_them_not_to_what_holds_them() -> None:
    """MultiheadAttention reads the weights of its `out_proj` and never calls it."""
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    flow.nn.cast(model, {"out_proj*": "fp32", "*": "bf16"})
    x = torch.randn(2, 3, 8)
    logical, found = ran(model, lambda x: model(x, x, x, need_weights=False)[0], x)
    assert [s.fake.dtype for s in logical.sources if s.name == "out_proj.weight"] == [FP32]
    hand = by_hand(model)
    y = x.to(BF16)
    assert torch.equal(found.result, hand(y, y, y, need_weights=False)[0].float())


def test_outside_of_the_model_weights_are_of_the_type_that_they_had() -> None:
    model = nn.Linear(4, 4)
    flow.nn.cast(model, {"*": "bf16"})

    def build(x: Tensor) -> Any:
        return model(x).sum() + model.weight.square().sum()

    _, found = ran(model, build, x := torch.randn(3, 4))
    hand = by_hand(model)
    assert torch.equal(found.result, hand(x.to(BF16)).float().sum() + hand.weight.float().square().sum())


def test_tied_weights_are_cast_together() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    flow.nn.cast(model, {"*": "bf16"})
    logical, found = ran(model, model, tokens := torch.randint(9, (3,)))
    assert [s.fake.dtype for s in logical.sources if s.kind == "parameter"] == [BF16]
    assert torch.equal(found.result, by_hand(model)(tokens).float())


class Positions(nn.Module):
    """Buffers, a plain attribute, and numbers that are no floats, among weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(6, 4))
        self.register_buffer("mask", torch.rand(6, 4) > 0.5)
        self.factor = torch.tensor([1.0, 0.5, 2.0, 3.0])
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        held: Any = self
        y = self.down(self.up((x + held.table) * self.factor).masked_fill(held.mask.any(-1, keepdim=True), 0.5))
        return {"y": y, "most": y.argmax(-1), "name": "positions"}


def test_buffers_and_plain_attributes_keep_their_type_and_weights_get_theirs() -> None:
    model: Any = Positions()
    flow.nn.cast(model, {"*": "bf16"})
    logical, found = ran(model, model, x := torch.randn(6, 4))
    up, down = by_hand(model.up), by_hand(model.down)
    y = up(((x.to(BF16) + model.table) * model.factor).to(BF16)).masked_fill(model.mask.any(-1, keepdim=True), 0.5)
    assert torch.equal(found.result["y"], down(y).float())
    assert (found.result["name"], found.result["most"].dtype) == ("positions", torch.int64)
    assert [s.fake.dtype for s in logical.sources if s.name == "table"] == [FP32]


def test_a_buffer_that_is_named_alone_is_cast_where_it_is_used() -> None:
    model = Positions()
    flow.nn.cast(model, {"*": "bf16"})
    flow.nn.cast(model, {"table": "bf16"})
    logical, _ = ran(model, model, torch.randn(6, 4))
    added = next(op for op in logical.ops if op.op is torch.ops.aten.add.Tensor)
    assert [logical.fakes[n].dtype for n in added.inputs] == [BF16, BF16]


def test_a_product_of_two_types_says_what_is_cast() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("b", torch.randn(4, 4))

        def forward(self, x: Tensor) -> Any:
            held: Any = self
            return (x + held.b) @ held.w

    model = Own()
    flow.nn.cast(model, {"*": "bf16"})
    with pytest.raises(SbpError, match=r"a product of fp32 and bf16, at .*test_precision") as error:
        trace(model, (torch.randn(4, 4),), {}, {"": model})
    assert "flow.nn.cast(model" in str(error.value)
    flow.nn.cast(model, {"b": "bf16"})
    ran(model, model, torch.randn(4, 4))


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_stay_fp32(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).train(training)
    flow.nn.cast(model, {"*": "bf16"})
    _, found = ran(model, model, x := torch.randn(3, 2, 6, 6))
    conv, (_, norm, _) = by_hand(model[0]), parts_of(model)
    y = conv(x.to(BF16))
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    weights = (norm.weight.to(BF16).float(), norm.bias.to(BF16).float())
    wanted = F.batch_norm(y, mean, var, *weights, training, 0.1)
    torch.testing.assert_close(found.result, wanted.relu().float(), rtol=1e-2, atol=1e-2)  # of a weight rounded once
    if training:
        torch.testing.assert_close(found.writes["1.running_mean"], mean, rtol=1e-6, atol=1e-6)


def test_layers_that_are_cast_otherwise_are_not_alike() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return x + self.up(self.norm(x))

    model = nn.Sequential(*(Layer() for _ in range(4)))
    flow.nn.cast(model, {"*": "bf16"})
    flow.nn.cast(model, {"2.norm": "fp32", "3": "fp32"})
    whole, again = (trace(model, (torch.randn(2, 4),), {}, {"": model}, reuse=reuse)[0] for reuse in (False, True))
    assert str(whole) == str(again)
    assert casts(again) == [BF16, FP32, BF16, FP32, BF16, FP32]  # of the model, the norm, and the last layer


def test_modules_that_a_call_makes_work_as_what_made_them() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return nn.Softmax(-1)(self.up(x))

    model = Makes()
    flow.nn.cast(model, {"*": "bf16"})
    _, found = ran(model, model, x := torch.randn(2, 4))
    assert torch.equal(found.result, by_hand(model)(x.to(BF16)).float())


def test_autocast_and_casts_go_together() -> None:
    model = nn.Sequential(OrderedDict(up=nn.Linear(4, 4), down=nn.Linear(4, 4)))
    flow.nn.cast(model, {"up": "bf16"})

    def build(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return model(x)

    _, found = ran(model, build, x := torch.randn(2, 4))
    up, down = by_hand(model[0]), by_hand(model[1])
    assert torch.equal(found.result, down(up(x.to(BF16))))


def test_a_packed_sequence_is_cast() -> None:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(4, 6, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, (last, _) = self.net(packed)
            return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], last

    model = Reader()
    flow.nn.cast(model, {"net": "bf16"})
    x, lengths = torch.randn(3, 5, 4), torch.tensor([5, 2, 4])
    _, found = ran(model, model, x, lengths)
    wanted = model(x, lengths)
    for mine, full in zip(found.result, wanted, strict=True):
        assert mine.dtype is FP32
        torch.testing.assert_close(mine, full, rtol=0.05, atol=0.02)  # three digits
