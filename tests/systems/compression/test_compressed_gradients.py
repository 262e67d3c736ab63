"""Compressed gradients beside all else that a step may do: errors are neither lost nor counted twice."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.graph.text.parse import from_text
from tests.systems.compression.runs import DATA, ROWS, batch, loss_fn, net, sent_bytes, step_of, trained, weights

BOTH = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
ALL = {"*": flow.encoders.topk(fraction=0.1)}


@dataclass(frozen=True)
class HalfEncoder(flow.encoders.Encoder):
    """An encoder of a user's own: float32 as bf16."""

    def encode(self, value: Tensor) -> tuple[Tensor, ...]:
        return (value.bfloat16(),)

    def decode(self, payload: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return payload[0].to(like.dtype)


def test_an_encoder_of_a_users_own_is_a_class_of_two_functions() -> None:
    step = step_of(net(128), {"*": HalfEncoder()})
    step(*batch(0))
    with flow.record() as moves:
        sent_bytes(step)
    (coded,) = [move for move in moves if move.op == "encoded"]
    assert coded.bytes == 3 * 2 * sum(p.numel() for p in net(128).parameters())
    assert from_text(step.text()).backs == step.physical.backs


@pytest.mark.parametrize(
    "encoder",
    [
        flow.encoders.sign(rows=True), flow.encoders.topk(fraction=0.2), flow.encoders.int4(block=64),
        flow.encoders.later(steps=3, of=flow.encoders.low_rank(rank=2)),
        flow.encoders.momentum(beta=0.5, steps=2, of=flow.encoders.sign(twice=True)),
    ],
    ids=str,
)  # fmt: skip
def test_the_text_of_a_step_says_its_encoders_and_is_read_back(encoder: flow.encoders.Encoder) -> None:
    step = step_of(net(), {"0.*": encoder}).plan_for(*batch(0))
    assert repr(f"{encoder} over 0") in step.text()
    assert from_text(step.text()).backs == step.physical.backs


def test_parameters_that_no_pattern_means_and_those_that_are_frozen_are_as_they_were() -> None:
    model = net()
    model[0].requires_grad_(False)
    step = step_of(model, {"0": flow.encoders.sign(), "2": flow.encoders.sign()})
    trained(step, 2)
    assert set(step.kept) == {"2.weight", "2.bias"}
    assert weights(model)["0.weight"].full_tensor().equal(weights(net())["0.weight"])


def test_a_tied_weight_is_encoded_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x).tanh()))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    step = step_of(Tied(), {"b.weight": flow.encoders.sign()})
    trained(step, 2)
    assert list(step.kept) == ["a.weight"]


def test_a_tensor_parallel_weight_is_encoded_over_data_alone() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": {"data": B, "tensor": S(0)}, "2.weight": {"data": B, "tensor": S(1)}})
    flow.nn.compress(model[2], flow.encoders.sign(), over="data")
    step = step_of(model, None, placement=BOTH)
    losses = trained(step, 30)
    assert losses[-1] < losses[0]
    error = step.kept.error("2.weight")
    assert error.sbp == (P, S(1))
    shards = weights(model)["2.weight"].to_local()
    assert torch.equal(shards[0], shards[2])
    assert torch.equal(shards[1], shards[3])


def test_errors_are_shared_by_steps_of_other_shapes() -> None:
    model = net()
    step = step_of(model, {"2.weight": flow.encoders.topk(fraction=0.1)})
    step(*batch(0))
    before = step.kept.error("2.weight").full_tensor()
    step(*batch(1, rows=16))
    after = step.kept.error("2.weight").full_tensor()
    assert before.any()
    assert not torch.equal(before, after)
    alone = step_of(net(), {"2.weight": flow.encoders.topk(fraction=0.1)})
    alone(*batch(0))
    assert torch.equal(alone.kept.error("2.weight").full_tensor(), before)


def test_a_step_that_is_left_out_leaves_errors_as_they_were() -> None:
    model = net()
    step = step_of(model, ALL, skip_nonfinite=True)
    trained(step, 2)
    before = step.kept.error("2.weight").full_tensor()
    held = weights(model)["2.weight"].full_tensor().clone()
    x, y = batch(2)
    step(x * torch.inf, y)
    assert step.skipped.count == 1
    assert torch.equal(step.kept.error("2.weight").full_tensor(), before)
    assert torch.equal(weights(model)["2.weight"].full_tensor(), held)
    assert torch.tensor(trained(step, 2)).isfinite().all()


@pytest.mark.parametrize(
    "encoder",
    [flow.encoders.sign(), flow.encoders.sign(rows=True), flow.encoders.int8(), flow.encoders.int4(), ALL["*"]],
    ids=str,
)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_seen_behind_an_encoder(encoder: flow.encoders.Encoder, bad: float) -> None:
    x = torch.randn(32, 4)
    x[3, 2] = bad
    assert not encoder.decode(encoder.encode(x), x).isfinite().all()


def test_reset_begins_anew() -> None:
    model = net()
    step = step_of(model, ALL)
    trained(step, 3)
    step.kept.reset()
    assert list(step.kept) == []
    assert torch.tensor(trained(step, 2)).isfinite().all()


def test_gradients_are_left_on_parameters_without_an_optimizer() -> None:
    model = net()
    step = flow.compile(model, loss_fn, placement=DATA, inputs=ROWS, compress={"*": HalfEncoder(feedback=False)})
    step(*batch(0))
    plain = net()
    loss_fn(plain, *batch(0)).backward()  # type: ignore[no-untyped-call]
    come, want = (weights(of)["2.weight"].grad for of in (model, plain))
    assert torch.allclose(come.full_tensor(), want, atol=1e-2)


@pytest.mark.parametrize("how", [{"micro_batches": 4}, {"clip_grad_norm": 0.5}, {"backend": "autograd"}], ids=str)
def test_other_options_go_with_it(how: dict[str, Any]) -> None:
    losses = trained(step_of(net(), ALL, **how), 12)
    assert losses[-1] < losses[0]


def test_pieces_of_weights_are_encoded_as_their_gradients_are_summed() -> None:
    """FSDP: weights rest in pieces, are gathered, and their gradients come home by an encoded sum."""
    losses = []
    for cut in (False, True):
        model = net()
        if cut:
            flow.nn.shard(model, {"*.weight": {"data": S(0)}})
        step = step_of(model, {"2.weight": flow.encoders.int8()})
        losses.append([step(*batch(at, rows=4096)).item() for at in range(4)])
        assert step.kept.error("2.weight").sbp == (P,)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_two_optimizers_and_groups_step_by_encoded_gradients() -> None:
    model = net()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
    first = torch.optim.SGD(groups, lr=0.1)
    second = torch.optim.Adam(model[4].parameters(), lr=0.01)
    options: Any = {"placement": DATA, "inputs": ROWS, "compress": ALL}
    step = flow.compile(model, loss_fn, [first, second], **options)
    losses = trained(step, 20)
    assert losses[-1] < losses[0]


def test_bf16_weights_are_encoded_in_the_type_in_which_gradients_are_summed() -> None:
    model = net()
    flow.nn.cast(model, {"*": torch.bfloat16})
    flow.nn.cast(model, {"*": torch.float32}, kind=("grads", "states"))
    step = step_of(model, ALL)
    losses = trained(step, 20)
    assert step.kept.error("2.weight").dtype is torch.float32
    assert losses[-1] < losses[0]


def test_one_rank_has_nothing_to_encode() -> None:
    one = flow.placement("cpu:[0-0] as (data=1)")
    assert trained(step_of(net(), ALL, placement=one), 3) == trained(step_of(net(), None, placement=one), 3)


def test_errors_are_in_the_account_of_memory() -> None:
    plain, coded = (step_of(net(), how).plan_for(*batch(0)).planned.held() for how in (None, {"2.weight": ALL["*"]}))
    assert coded[0].states - plain[0].states == 32 * 32 * 4
    step = step_of(net(), {"*": flow.encoders.momentum(of=flow.encoders.sign(twice=True))}, memory=25e3)
    with pytest.raises(flow.SbpError, match="errors of compressed gradients"):
        step.plan_for(*batch(0))


PLAN = "grid (data=4)\ninput x <- data=S(0)\ninput y <- data=S(0)\n"


def by_plan(line: str) -> Any:
    model = net()
    return flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), plan=PLAN + line)


def test_a_line_of_a_plan_says_encoders() -> None:
    step = by_plan("compress ** by sign(rows=True) over data\ncompress 2.weight by topk(fraction=0.1)")
    step(*batch(0))
    coded = {back.into: str(back.encoding.encoder) for back in step.physical.backs if back.encoding}
    assert coded.pop("2.weight") == "topk(fraction=0.1)"
    assert set(coded.values()) == {"sign(rows=True)"}
    assert "compress ** by sign(rows=True) over data" in str(step.plan)


WRONG = {
    "compress ** by sgn()": "no encoder is called 'sgn'",
    "compress ** by topk(fraction=3)": "part of the elements",
    "compress ** by topk(part=3)": "unexpected keyword argument 'part'",
    "compress ** by sign() over tensor": "no axis tensor",
    "compress weights ** by sign()": "no kind of move",
    "compress hops 2 by int8() over data": "along no axis",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_shown_with_its_place(line: str) -> None:
    with pytest.raises(flow.SbpError, match=WRONG[line]) as caught:
        by_plan(line)(*batch(0))
    assert f"4 | {line}" in str(caught.value)


REFUSED: list[tuple[Any, str]] = [
    (lambda: step_of(net(), {"nothing.*": flow.encoders.sign()})(*batch(0)), "no parameter or module called"),
    (lambda: step_of(net(), {"*": "sign"})(*batch(0)), "give it an encoder"),
    (lambda: flow.nn.compress(net(), flow.encoders.sign(), kind="weights"), "known are 'grads' and 'hops'"),  # type: ignore[arg-type]
    (lambda: flow.nn.compress(net(), flow.encoders.int8(), kind="hops", over="data"), "along no axis"),
    (lambda: step_of(flow.nn.compress(net(), flow.encoders.sign(), over="tensor"), None)(*batch(0)), "has no axis"),
    (lambda: flow.encoders.topk(fraction=2.0), "part of the elements"),
    (lambda: flow.encoders.low_rank(rank=0), "rank is from 1"),
    (lambda: flow.encoders.int4(block=7), "share a scale"),
    (lambda: flow.encoders.later(steps=-1), "how many steps"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_has_no_meaning_is_refused(make: Any, said: str) -> None:
    with pytest.raises(flow.SbpError, match=said):
        make()


def _encoded(step: Any) -> set[str]:
    """The parameters of a step whose gradients go home encoded."""
    return {back.into for back in step.plan_for(*batch(0)).physical.backs if back.encoding is not None}


@pytest.mark.parametrize("over", [None, "data"])
@pytest.mark.parametrize("place", [DATA, BOTH], ids=["data", "data and tensor"])
def test_who_says_an_encoder_says_that_gradients_are_summed(place: flow.Placement, over: str | None) -> None:
    """Of a small model each rank computed all, which is cheaper than any sum, and the encoder was refused."""
    plain = step_of(net(), None).plan_for(*batch(0)).physical
    assert not any(back.src.state.partial for back in plain.backs)
    model = flow.nn.compress(net(), flow.encoders.int8(), over=over)
    assert _encoded(step_of(model, None, placement=place)) == {name for name, _ in model.named_parameters()}


def test_a_gradient_that_is_no_sum_over_the_axis_is_refused() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": {"data": B, "tensor": S(0)}, "2.weight": {"data": B, "tensor": S(1)}})
    flow.nn.compress(model, {"2.weight": flow.encoders.sign()}, over="tensor")
    with pytest.raises(flow.SbpError, match="is a sum over tensor") as refused:
        step_of(model, None, placement=BOTH)(*batch(0))
    assert "flow.nn.shard(model, {'2.weight': {'tensor': B}})" in str(refused.value)
    flow.nn.shard(model, {"2.weight": {"tensor": B}})
    assert _encoded(step_of(model, None, placement=BOTH)) == {"2.weight"}


def test_a_weight_cut_unevenly_over_another_axis_is_refused() -> None:
    model = net(33)
    flow.nn.shard(model, {"0.weight": {"data": B, "tensor": S(0)}, "2.weight": {"data": B, "tensor": S(1)}})
    flow.nn.compress(model, {"2.weight": flow.encoders.sign()}, over="data")
    with pytest.raises(flow.SbpError, match="cut unevenly"):
        step_of(model, None, placement=BOTH)(*batch(0))


def test_fp16_with_its_loss_scale_is_refused() -> None:
    model = net()
    flow.nn.cast(model, {"*": torch.float16})
    with pytest.raises(flow.SbpError, match="fp16"):
        step_of(model, ALL)(*batch(0))


def test_a_move_leaves_no_errors_behind() -> None:
    """They stayed on the ranks of before, and were neither added to a gradient nor told to be lost."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4))
    two, four = flow.placement("cpu", range(2)), flow.placement("cpu", range(4))
    how: dict[str, Any] = {"inputs": {"x": S(0), "y": S(0)}, "compress": {"*": flow.encoders.sign()}}
    step = flow.compile(model, mse, torch.optim.SGD(model.parameters(), 0.1), placement=two, **how)
    step(x, y)
    held = step.kept.error("0.weight").full_tensor().clone()
    step.move(backend="code")
    step.plan_for(x, y)
    assert torch.equal(step.kept.error("0.weight").full_tensor(), held)
    step.move(placement=four)
    with pytest.raises(flow.SbpError, match=r"has errors on cpu:.0-1., where they would be left"):
        step(x, y)
    assert [x.placement for x in model.state_dict().values()] == [two, two]
    step.kept.reset()
    step(x, y)
    assert step.kept.error("0.weight").placement == four


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "encoder",
    [
        flow.encoders.later(steps=1, of=flow.encoders.topk(fraction=0.1)),
        flow.encoders.topk(fraction=0.1, twice=True), flow.encoders.int4(), flow.encoders.low_rank(rank=1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("way", ["memory", "state"])
def test_nothing_is_lost_where_addends_come_to_lie_otherwise(encoder: flow.encoders.Encoder, way: str) -> None:
    """An encoder that begins later began anew, and forgot its error; so was what shares of a sum had left out."""
    errors, total, come = flow.encoders.KeptErrors(), torch.zeros(8, 6), torch.zeros(8, 6)
    for at in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(at))
        lies = (P, S(0)) if way == "state" and at > 2 else (P, B)
        first = torch.randn(8, 6, generator=torch.Generator().manual_seed(at + 9))
        each = [y for one in (first, x - first) for y in ([one, one] if lies[1] is B else torch.split(one, 4))]
        addends: Any = flow.from_local(each, placement=BOTH, sbp=lies)
        if way == "memory" and at > 2:
            addends = flow.tensor(x.t().contiguous().t(), placement=BOTH, sbp=lies)
        whole = addends.to_global(sbp=(B, lies[1]), encoder=encoder, kept=errors["x"])
        total, come = total + x, come + whole.full_tensor()
    nothing: Any = flow.tensor(torch.zeros(8, 6), placement=BOTH, sbp=(P, B))
    for _ in range(60 if encoder.twice else 0):  # what shares of the sum have left out is seen when it comes
        come = come + nothing.to_global(sbp=B, encoder=encoder, kept=errors["x"]).full_tensor()
    left = flow.nn.StepErrors(errors).error("x").full_tensor()
    torch.testing.assert_close(come + left, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "encoder",
    [flow.encoders.sign(), flow.encoders.sign(rows=True), flow.encoders.int8(), flow.encoders.int4()],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3)], ids=str)
def test_numbers_and_nothing_keep_their_shape(encoder: flow.encoders.Encoder, shape: tuple[int, ...]) -> None:
    x: Any = flow.tensor(torch.ones(shape), placement=DATA, sbp=P)
    come = x.to_global(sbp=B, encoder=encoder)
    assert all(torch.equal(piece, torch.ones(shape)) for piece in come.to_local())


@pytest.mark.parametrize("ranks", [1, 4])
def test_errors_that_were_loaded_and_that_no_gradient_takes_up_are_told(ranks: int) -> None:
    """One rank, or a step without encoders: it went on, and what had been left out never came."""
    before, data = step_of(net(), ALL), flow.placement("cpu", range(ranks), names=("data",))
    trained(before, 2)
    step = step_of(net(), ALL if ranks == 1 else None, placement=data)
    step.kept.load_state_dict(before.kept.state_dict())
    with pytest.raises(flow.SbpError, match="was loaded, and no gradient of this step is encoded"):
        step(*batch(2))
    step.kept.reset()
    step(*batch(2))
