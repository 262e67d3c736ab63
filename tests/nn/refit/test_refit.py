"""Weights get from any plan into any other: the very values, at the bound, and nothing that nobody asked for."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.exchange.execute import transport
from sbpflow.placement.errors import DtypeError, SbpError, ShapeError
from tests.ranks import Ranks

F32, BF16 = torch.float32, torch.bfloat16
PLANS = {
    "4 ranks": "grid (data=4)",
    "ZeRO-3": "grid (data=4)\n**: data=S(0)",
    "TP": "grid (tensor=4)\nlayers.*.up.weight: tensor=S(0)\nlayers.*.down.weight: tensor=S(1)",
    "pipeline": "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 2 micro-batches\nstates **: data=S(0)",
    "pipeline of TP": "grid (pipe=2, tensor=2)\npipe layers over pipe by 1f1b, 2 micro-batches\n"
    "layers.*.up.weight: tensor=S(0)",
    "bf16": "grid (data=4)\nstates **: data=S(0)\ncast ** to bf16\ncast {grads,states} ** to fp32",
}
FOUR = flow.placement("cpu:[0-3]")
TARGETS: dict[str, tuple[flow.Placement, Any]] = {
    "2 other ranks": (flow.placement("cpu", [4, 5]), B),
    "2 of them, TP": (flow.placement("cpu", [2, 3]), S(-1)),
    "one rank": (flow.placement("cpu", [1]), B),
    "3 ranks, one of them": (flow.placement("cpu", [3, 4, 5]), S(0)),
    "4 in another order": (flow.placement("cpu", [2, 0, 3, 1]), S(0)),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("own", torch.rand(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def net(seed: int = 0, dtype: torch.dtype = F32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


TWO = {  # of four ranks that are started
    "ZeRO-3": "grid cpu:[0-1] as (data=2)\n**: data=S(0)",
    "pipeline": "grid cpu:[0-1] as (pipe=2)\npipe layers over pipe by 1f1b, 2 micro-batches",
    "TP": "grid cpu:[0-1] as (tensor=2)\nlayers.*.up.weight: tensor=S(0)\nlayers.*.down.weight: tensor=S(1)",
}


def trained(plan: str) -> Net:
    """After a step by a plan."""
    model = net()
    step = flow.compile(
        model,
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        torch.optim.AdamW(model.parameters(), 0.1),
        plan=plan,
    )
    torch.manual_seed(1)
    step(torch.randn(8, 8), torch.randint(3, (8,)))
    return model


def target(where: str, dtype: torch.dtype = F32) -> Net:
    placement, sbp = TARGETS[where]
    return flow.nn.to_global(net(7, dtype), placement, sbp)


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, flow.GlobalTensor) else x).detach()


def alike(source: nn.Module, target: nn.Module) -> bool:
    """Whether all of the target is the source's, in the target's dtype; nothing where this process has none of it."""
    pairs = zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    return all(torch.equal(whole(x).to(y.dtype), whole(y)) for x, y in pairs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 200])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_of_any_plan_come_at_the_bound(plan: str, where: str, dtype: torch.dtype, bucket_bytes: int) -> None:
    source, there = trained(PLANS[plan]), target(where, dtype)
    before = transport().sent.bytes.total()
    with flow.record() as moves:
        report = flow.refit(source, there, bucket_bytes=bucket_bytes)
    sent = transport().sent.bytes.total() - before
    assert alike(source, there)
    assert sent == report.bytes == report.bound == sum(move.boxing.total for move in moves)
    assert report.tensors == len(moves) == len(source.state_dict())


def test_a_weight_in_columns_goes_in_shares_to_many() -> None:
    """Each fetches some rows, and what they give each other then is not cut into the shares in which it came."""
    source, there = (nn.Linear(768, 512, bias=False) for _ in range(2))
    flow.nn.to_global(source, flow.placement("cpu:[0-1]"), S(1))
    flow.nn.to_global(there, flow.placement("cpu:[4-7]"), B)
    (plan,) = flow.refit(source, there, bucket_bytes=1 << 20).plans
    assert plan.route == "transfer, all_gather"
    want = whole(source.weight)
    assert all(torch.equal(shard, want) for shard in there.weight._shards)  # type: ignore[attr-defined]


class Fresh(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that memory made here had at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given and made.nbytes:
            size = made.untyped_storage().nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(made, self.gone, size)
        return made

    def gone(self, size: int) -> None:
        self.now -= size


def on_ranks(plan: str, ranks: list[int], bucket_bytes: int) -> tuple[bool, int, int, int, int]:
    source = trained(TWO[plan])
    there = flow.nn.to_global(net(7, BF16), flow.placement("cpu", ranks), S(0))
    before = transport().sent.bytes.total()
    fresh = Fresh()
    with fresh:
        report = flow.refit(source, there, bucket_bytes=bucket_bytes)
    sent = transport().sent.bytes.total() - before
    return alike(source, there), sent, report.bytes, report.bound, fresh.most


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("plan", "ranks"), [("ZeRO-3", [2, 3]), ("pipeline", [1, 2]), ("TP", [1])])
def test_real_ranks_hold_no_more_than_a_bucket_besides(ranks4: Ranks, plan: str, ranks: list[int]) -> None:
    """Of four some train, some are refilled, and others stand by."""
    found = ranks4(on_ranks, plan, ranks, 256)
    assert all(right for right, *_ in found)
    assert {(of, bound) for _, _, of, bound, _ in found} == {(sum(sent for _, sent, *_ in found),) * 2}
    assert 0 < max(most for *_, most in found) <= 256


def through_rank_0() -> tuple[int, int]:
    source, there = trained(PLANS["ZeRO-3"]), target("2 of them, TP")
    before = transport().sent.bytes.total()
    report = flow.refit(source, there)
    ours = transport().sent.bytes.total()
    zero = flow.placement("cpu", [0])
    for x in source.state_dict().values():
        gathered = x.to_global(placement=zero, sbp=B)
        gathered.to_global(placement=flow.placement("cpu", [2, 3]), sbp=B)
    assert report.bytes == report.bound
    return ours - before, transport().sent.bytes.total() - ours


def test_fewer_bytes_than_through_rank_0(ranks4: Ranks) -> None:
    ours, other = (sum(each) for each in zip(*ranks4(through_rank_0), strict=True))
    assert 2.5 * ours < other


NAMES: dict[str, Any] = {
    "names": {f"layers.{at}.up.{kind}": f"blocks.{at}.first.{kind}" for at in range(4) for kind in ("weight", "bias")}
    | {"layers.*.norm.**": "blocks.*.norm.**", "layers.*.down.*": "blocks.*.down.*"},
    "patterns": {"layers.*.up.*": "blocks.*.first.*", "layers.**": "blocks.**"},
    "function": lambda name: name.replace("layers.", "blocks.").replace(".up.", ".first."),
}


@pytest.mark.parametrize("how", NAMES)
def test_names_are_mapped(how: str) -> None:
    source, there = net(), net(7)
    there.blocks = there.layers
    del there.layers
    for block in there.blocks:
        block.first = block.up
        del block.up
    assert flow.refit(source, there, names=NAMES[how]).unused == ()
    assert sorted(map(str, source.state_dict().values())) == sorted(map(str, there.state_dict().values()))


def test_tied_weights_go_once_and_what_the_target_has_not_is_told() -> None:
    source, there = net(), net(7)
    source.extra = nn.Linear(2, 2)
    for each in (source, there):
        each.layers[1].up.weight = each.layers[0].up.weight  # type: ignore[union-attr]
    report = flow.refit(source, there)
    assert report.tensors == len(set(map(id, there.parameters()))) + 1
    assert report.unused == ("extra.weight", "extra.bias")
    assert str(report) == (
        "26 tensors in 1 bucket: 0 bytes sent (bound 0 bytes), 0 bytes to the busiest rank; "
        "not taken: extra.weight, extra.bias"
    )


def test_only_what_changed_is_sent() -> None:
    source, there = flow.nn.to_global(net(), FOUR, S(0)), target("2 other ranks")
    counts = [flow.refit(source, there, only_changed=True).tensors]
    counts.append(flow.refit(source, there, only_changed=True).tensors)
    with torch.no_grad():
        source.head.weight.mul_(2)
        there.get_parameter("layers.0.up.bias")._shards[1].data[3] = 5.0  # type: ignore[attr-defined]
    counts.append(flow.refit(source, there, only_changed=True).tensors)
    assert counts == [27, 0, 2]
    assert alike(source, there)


def changes() -> list[int]:
    source, there = flow.nn.to_global(net(), flow.placement("cpu", [0, 1]), S(0)), target("2 of them, TP")
    found = []
    for at in range(3):
        if source.head.weight._shards[0].numel() and at == 2 and 0 in flow.boxing.owned(source.head.weight.placement):  # type: ignore[attr-defined]
            source.head.weight._shards[0].data.mul_(3)  # type: ignore[attr-defined]  # on one rank
        found.append(flow.refit(source, there, only_changed=True).tensors)
    assert alike(source, there)
    return found


def test_ranks_agree_on_what_changed(ranks4: Ranks) -> None:
    assert ranks4(changes) == [[27, 0, 1]] * 4


def test_an_optimizer_goes_on_from_the_new_weights() -> None:
    """Also one that has a master of each weight in pieces."""
    source, there = net(3), net()
    step = flow.compile(
        there,
        lambda model, x: model(x).square().mean(),
        torch.optim.SGD(there.parameters(), 0.0),
        plan=PLANS["bf16"],
    )
    step(torch.ones(4, 8))
    flow.refit(source, there)
    step(torch.ones(4, 8))
    assert alike(source, there)


WRONG: dict[str, tuple[Callable[[Net, Net], Any], type[Exception], str]] = {
    "name": (lambda a, b: delattr(a, "head"), SbpError, r"nothing for head.weight, head.bias.*\n(.*\n)*  say what"),
    "shape": (lambda a, b: setattr(a, "head", nn.Linear(8, 4)), ShapeError, r"head.weight is \(4, 8\) in the source"),
    "dtype": (lambda a, b: a.register_buffer("scale", torch.ones(3).long()), DtypeError, r"scale is torch.int64 in"),
    "meta": (lambda a, b: b.to("meta"), SbpError, r"of the target is on meta(.*\n)*.*materialise"),
    "graph": (
        lambda a, b: b.register_buffer("scale", b.get_parameter("layers.0.up.bias")[:3] * 2),
        SbpError,
        "scale of the target is computed from other tensors",
    ),
    "tied": (
        lambda a, b: setattr(b.layers[1].up, "weight", b.layers[0].up.weight),  # type: ignore[union-attr]
        SbpError,
        r"names=\{'layers.1.up.weight': None\}",
    ),
    "range": (
        lambda a, b: (a.head.weight.data.fill_(1e6), b.half()),
        DtypeError,
        "head.weight has numbers that torch.float16 does not hold",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused_before_anything_changes(wrong: str) -> None:
    spoil, kind, said = WRONG[wrong]
    source, there = net(), net(7)
    spoil(source, there)
    before = copy.deepcopy({name: x.detach() for name, x in there.state_dict().items()})
    with pytest.raises(kind, match=said):
        flow.refit(source, there)
    if wrong != "meta":
        assert all(torch.equal(before[name], x) for name, x in there.state_dict().items())


def test_names_that_nothing_is_called_are_refused() -> None:
    with pytest.raises(
        SbpError,
        match=r"has 'layer.\*.up.weight', and the source nothing called so\n  did you mean 'layers.\*.up.weight'",
    ):
        flow.refit(net(), net(), names={"layer.*.up.weight": "x"})
    with pytest.raises(SbpError, match=r"are both called head.weight in the target"):
        flow.refit(net(), net(), names={"layers.0.up.weight": "head.weight"})
    with pytest.raises(SbpError, match="more stars in the new name"):
        flow.refit(net(), net(), names={"layers.0.up.*": "*.*"})
    model = net()
    with pytest.raises(SbpError, match="one model, which has its weights"):
        flow.refit(model, model)
    with pytest.raises(SbpError, match="is no module but of type OrderedDict"):
        flow.refit(model.state_dict(), model)  # type: ignore[arg-type]


def test_the_busiest_rank_is_told_by_all_that_it_receives() -> None:
    """Rank 2 gets 48 and 12 bytes, rank 0 a third of these; rank 1 only sends."""
    source, target = nn.Linear(4, 3), nn.Linear(4, 3)
    flow.nn.to_global(source, flow.placement("cpu", [0, 1]), S(0))
    flow.nn.to_global(target, flow.placement("cpu", [0, 2]), B)
    report = flow.refit(source, target)
    assert (report.bytes, report.most) == (80, 60)
