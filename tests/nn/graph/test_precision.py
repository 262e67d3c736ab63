"""Steps in mixed precision train as one device does by hand: weights in few bits, a master and its states in many."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.boxing.graph.text.text import fingerprint
from tests.nn.graph.by_hand import BF16, FP32, STEPS, ByHand, batches, masters, mixed, net, same, square_loss, trained
from tests.nn.graph.zoo import made

COLUMNS: dict[str, Any] = {"0.*": S(0), "3.weight": S(1), "*": B}
WAYS: dict[str, tuple[int, Any, float]] = {
    "one": (1, {}, 0.0),
    "copies": (2, {"*": B}, 0.0),
    "columns and rows": (2, COLUMNS, 2e-2),  # partial sums of a row are rounded to bf16 before they are added
    "pieces": (4, {"*": S(0)}, 2e-2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_masters_train_as_by_hand(way: str) -> None:
    ranks, hints, tol = WAYS[way]
    model, hand = net(), ByHand(net())
    flow.nn.shard(mixed(model), hints)
    _, optimizer, losses = trained(model, flow.placement("cpu", range(ranks)))
    same(optimizer, hand, losses, [hand.step(square_loss, x) for x in batches()], tol)
    for p, q in zip(model.parameters(), masters(optimizer), strict=True):
        assert p.dtype is BF16
        assert torch.equal(p.full_tensor(), q.full_tensor().to(BF16))  # rounded once


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("states", [None, S(0)], ids=["replicated", "ZeRO-1"])
def test_gradients_of_ranks_are_added_in_their_type(ranks: int, states: Any) -> None:
    """Each rank has some samples; its gradient is bf16, and their sum fp32."""
    p, rows = flow.placement("cpu", range(ranks)), batches(3, 2048)  # as many that samples stay where they are
    losses, weights = {}, {}
    for grads in ("fp32", "bf16"):
        model = flow.nn.shard(mixed(net(), grads=grads), {"*": B})
        if states is not None:
            flow.nn.shard(model, {"*": states}, kind="states")
        data = [(flow.tensor(x, placement=p, sbp=S(0)),) for x in rows]
        with flow.use_cluster("cpu"):  # wherever it runs: by a card's prices samples come together
            step, optimizer, losses[grads] = trained(model, p, data=data)
        with flow.record() as moves:
            step(*data[0])
        sums = [m.boxing.src.dtype for m in moves if m.boxing.src.state.partial and m.boxing.src.shape]
        assert sums
        assert set(sums) == {FP32 if grads == "fp32" else BF16}
        weights[grads] = masters(optimizer)
        hand = ByHand(net(), grads=FP32, pieces=ranks)
        for x in (*rows, rows[0]):
            hand.step(square_loss, x)
        pairs = zip(weights[grads], hand.master.parameters(), strict=True)
        off = max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs)
        assert (off < 1e-5) is (grads == "fp32"), off


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Adafactor", "SGD", "NAdam"])
def test_optimizers_change_the_master(kind: str) -> None:
    """Those that look at more than an element too, whose pieces are brought together for the step."""
    settings = {"lr": 1e-2, **({"momentum": 0.9} if kind == "SGD" else {})}
    model, hand = flow.nn.shard(mixed(net()), {"*": B}), ByHand(net())
    flow.nn.shard(model, {"*": S(0)}, kind="states")
    hand.optimizer = getattr(torch.optim, kind)(hand.master.parameters(), **settings)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    step = flow.compile(model, square_loss, optimizer, placement=flow.placement("cpu", range(2)))
    losses = [step(x).detach().full_tensor() for x in batches()]
    same(optimizer, hand, losses, [hand.step(square_loss, x) for x in batches()], 1e-6)


def nbytes(tensors: Any, rank: int) -> int:
    return sum(x._shards[rank].untyped_storage().nbytes() for x in tensors)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "ZeRO-1"])
def test_a_parameter_rests_in_2_and_4_and_12_bytes(cut: bool) -> None:
    model = flow.nn.shard(mixed(net()), {"*": B})
    if cut:
        flow.nn.shard(model, {"*": S(0)}, kind="states")
    step, optimizer, _ = trained(model, flow.placement("cpu", range(2)))
    many = sum(p.numel() for p in model.parameters())
    kept = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    part = many // 2 if cut else many
    for rank in range(2):
        assert nbytes(model.parameters(), rank) == 2 * many
        assert nbytes(masters(optimizer), rank) + nbytes(kept, rank) == 12 * part
    account = step.explain().dict()["memory"]["ranks"]["0"]
    assert (account["parameters"], account["gradients"], account["states"]) == (2 * many, 4 * part, 12 * part)


def test_the_master_begins_as_the_exact_weights_were() -> None:
    model, before = mixed(net()), [p.detach().clone() for p in net().parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    where = flow.placement("cpu", range(2))
    flow.compile(model, placement=where)(batches()[0])  # an inference that comes first
    assert model[0].weight.dtype is BF16
    step = flow.compile(model, square_loss, optimizer, placement=where)
    step(batches()[0])
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(masters(optimizer), before, strict=True))
    step(batches()[0][:8])  # of another shape
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(masters(optimizer), before, strict=True))


def test_frozen_weights_leave_nothing_behind_but_few_bits() -> None:
    model = mixed(net())
    model[0].requires_grad_(False)
    where = flow.placement("cpu", range(2))
    flow.compile(model, placement=where)(batches()[0])
    held = [[*vars(p).values()] for p in (model[0].weight, model[3].weight)]
    digits = [sum(isinstance(x, Tensor) and x.dtype is FP32 for x in values) for values in held]
    assert digits == [0, 1]  # those for a master that may come


def test_weights_that_were_loaded_after_the_cast_are_the_masters() -> None:
    model = mixed(net())
    where = flow.placement("cpu", range(2))
    flow.compile(model, placement=where)(batches()[0])
    with torch.no_grad():
        model[0].weight[0].fill_(3.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    flow.compile(model, square_loss, optimizer, placement=where)(batches()[0])
    master = masters(optimizer)[0].full_tensor()
    assert torch.equal(master[0], torch.full((8,), 3.25))
    assert torch.equal(master[1:], net()[0].weight[1:])


def test_without_more_words_all_is_of_the_type_of_the_weights() -> None:
    model, hand = flow.nn.cast(net(), {"*": BF16}), net().to(BF16)
    plain = torch.optim.Adam(hand.parameters(), lr=1e-2)
    _, optimizer, _ = trained(model, flow.placement("cpu", range(2)))
    for x in batches():
        square_loss(hand, x).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(masters(optimizer), hand.parameters(), strict=True))
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {BF16}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_a_pipeline_adds_gradients_of_micro_batches_in_their_type(schedule: str) -> None:
    model, hand = mixed(net()), ByHand(net(), pieces=4)
    stages = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    flow.nn.place(model[:3], stages[0])
    flow.nn.place(model[3:], stages[1])
    step, optimizer, losses = trained(model, None, micro_batches=4, schedule=schedule)
    same(optimizer, hand, losses, [hand.step(square_loss, x) for x in batches()], 1e-5)
    with flow.record() as moves:
        step(batches()[0])
    hops = {
        m.boxing.src.dtype
        for m in moves
        if m.boxing.src.placement is not m.boxing.dst.placement and len(m.boxing.src.shape) > 1
    }
    assert hops == {BF16}


def test_layers_that_are_cast_apart_hop_in_their_type() -> None:
    """Nothing is said of the model around them: what is widened between two of them is not sent so."""
    model = net()
    flow.nn.cast(model, {"0": BF16, "1": BF16, "2": BF16, "3": BF16, "4": BF16})
    flow.nn.place(model[:3], flow.placement("cpu", [0]))
    flow.nn.place(model[3:], flow.placement("cpu", [1]))
    step, _, _ = trained(model, None, micro_batches=2)
    with flow.record() as moves:
        step(batches()[0])
    hops = {
        m.boxing.src.dtype
        for m in moves
        if m.boxing.src.placement is not m.boxing.dst.placement and len(m.boxing.src.shape) > 1
    }
    assert hops == {BF16}


def test_norms_in_fp32_within_bf16_layers() -> None:
    model = mixed(net())
    flow.nn.cast(model, {"2": "fp32"})
    where = flow.placement("cpu", range(2))
    _, optimizer, losses = trained(model, where)

    def hand_loss(model: nn.Module, x: Tensor) -> Any:
        first, gelu, norm, more, last = model.children()
        y = norm(gelu(first(x.to(BF16))).float()).to(BF16)
        return last(more(y)).float().square().mean()

    hand = ByHand(net())
    hand.copy[2].float()
    same(optimizer, hand, losses, [hand.step(hand_loss, x) for x in batches()], 0.0)
    assert model[2].weight.dtype is FP32


class Gpt(nn.Module):
    """Tied words, integers in, a dict out, a batch norm and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight
        self.factor = torch.full((16,), 0.5)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = (x * self.factor).to(self.head.weight.dtype)
        return {"logits": self.head(x), "most": x.argmax(-1)}


def words_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)["logits"].float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> Any:
    torch.manual_seed(2)
    return Gpt()


def tokens() -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randint(32, (8, 8), generator=draw),) for _ in range(STEPS)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpt_trains_as_by_hand(ranks: int) -> None:
    model, hand = mixed(gpt()), ByHand(gpt())

    def hand_loss(model: Any, tokens: Tensor) -> Any:
        x = model.words(tokens) + model.places(torch.arange(8))
        for layer in model.layers:
            x = layer(x)
        norm = model.norm
        # torch refuses to mix bf16 weights with running statistics in fp32, which a graph keeps so
        weight, bias = (p.float() for p in norm.parameters())
        wide = F.batch_norm(x.transpose(1, 2).float(), norm.running_mean, norm.running_var, weight, bias, True)
        x = wide.to(BF16).transpose(1, 2)
        return F.cross_entropy(
            model.head((x * model.factor).to(BF16)).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    _, _, losses = trained(model, flow.placement("cpu", range(ranks)), words_loss, tokens())
    wanted = [hand.step(hand_loss, *each) for each in tokens()]
    torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=1e-2, atol=1e-2)
    assert {b.dtype for name, b in model.named_buffers() if "running" in name} == {FP32}
    norm: Any = model.norm
    torch.testing.assert_close(norm.running_var.full_tensor(), hand.copy.norm.running_var, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        found = flow.compile(model.eval())(tokens()[0][0])
    assert (found["logits"].dtype, found["most"].dtype) == (FP32, torch.int64)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_llama_trains_as_by_hand(ranks: int) -> None:
    """The sums of residual gradients are rounded in another order: to one part of 256 each."""
    model, _ = made("llama")
    hand = ByHand(model)

    def loss_fn(model: Any, ids: Tensor) -> Any:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    ids = [(torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(n)),) for n in range(STEPS)]
    _, optimizer, losses = trained(mixed(model), flow.placement("cpu", range(ranks)), loss_fn, ids)
    wanted = [hand.step(loss_fn, *each) for each in ids]
    torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=3e-3, atol=3e-3)
    assert {p.dtype for p in masters(optimizer)} == {FP32}
    assert {p.dtype for p in model.parameters()} == {BF16}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [None, S(0)], ids=["copies", "pieces"])
def test_what_is_sent_is_what_the_plan_says(cut: Any) -> None:
    p = flow.placement("cpu", range(2))
    model = flow.nn.shard(mixed(net()), {"*": cut or B})
    flow.nn.shard(model, {"*": S(0)}, kind="states")
    x = flow.tensor(batches(1, 2048)[0], placement=p, sbp=S(0))
    step, _, _ = trained(model, p, data=[(x,)])
    with flow.record() as moves:
        step(x)
    planned = sum(row.total * row.count for row in step.explain().moves)
    assert planned == sum(move.boxing.total for move in moves) > 0
    again = from_text(step.text())
    assert [s.home.dtype for s in again.sources if s.grads is not None] == [FP32] * 8
    assert fingerprint(again) == fingerprint(step.physical)


def test_weights_that_rest_in_fp32_and_compute_in_bf16_have_their_gradients_added_in_fp32() -> None:
    """Parameters that are named alone rest in their type; what is gathered of them may be cast before."""
    p, rows = flow.placement("cpu", range(2)), batches(3, 2048)
    model = net()
    flow.nn.cast(model, {"*": "bf16"})
    flow.nn.cast(model, {"*.weight": "fp32", "*.bias": "fp32"})
    flow.nn.shard(model, {"*": S(0)})
    data = [(flow.tensor(x, placement=p, sbp=S(0)),) for x in rows]
    step, optimizer, _ = trained(model, p, data=data)
    assert {w.dtype for w in masters(optimizer)} == {FP32}
    hand = ByHand(net(), pieces=2)
    for x in rows:
        hand.step(square_loss, x)
    for mine, theirs in zip(masters(optimizer), hand.master.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor().detach(), theirs.detach(), rtol=1e-2, atol=1e-2)
    with flow.record() as moves:
        step(*data[0])
    scattered = [
        m for m in moves if m.boxing.src.state.partial and m.boxing.dst.state.split and m.boxing.src.shape[0] < 2048
    ]
    assert {m.boxing.src.dtype for m in scattered} == {FP32}


def test_weights_of_a_meta_model_are_drawn_as_one_device_draws_them_and_then_cast() -> None:
    with torch.device("meta"):
        model = mixed(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(3)
    flow.compile(model, square_loss, optimizer, placement=flow.placement("cpu", range(2)))(batches()[0])
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    for mine, theirs, low in zip(masters(optimizer), plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
        assert torch.equal(low.full_tensor(), theirs.to(BF16))
