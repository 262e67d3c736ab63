"""Dropless experts: tokens go to the ranks of the experts that they chose, and all is as on one device."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp.state import nth_part
from tests.ranks import Ranks

F64, WIDTH, INNER, RANKS = torch.float64, 16, 12, 4


class Layer(nn.Module):
    """A router whose choices may lean to one expert; shares do not, so that it learns whomever all choose."""

    def __init__(self, experts: int = 8, choices: int = 2, gated: bool = True, favourite: int | None = None) -> None:
        super().__init__()
        self.choices, self.act = choices, "silu" if gated else "gelu"
        self.gate = nn.Linear(WIDTH, experts, dtype=F64)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, (1 + gated) * INNER, dtype=F64) / 4)
        self.down = nn.Parameter(torch.randn(experts, INNER, WIDTH, dtype=F64) / 4)
        lean = torch.zeros(experts, dtype=F64)
        if favourite is not None:
            lean[favourite] = 1000.0
        self.lean = nn.Buffer(lean)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = (shares + self.lean).topk(self.choices, -1).indices
        return x + flow.nn.experts(x, chosen, shares.gather(-1, chosen), self.up, self.down, act=self.act)


class Layers(nn.Module):
    def __init__(self, count: int = 1, **said: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(**said) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = """
grid (expert=4)
input x <- expert=S(0)
**.up: expert=S(0)
**.down: expert=S(0)
inside layers.* use dropless over expert
"""
PIPED = PLAN.replace("(expert=4)", "(pipe=2, expert=2)") + "pipe layers over pipe by 1f1b, 2 micro-batches\n"


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def tokens(rows: int = 32) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)


def trained(model: nn.Module, plan: str = PLAN, rows: int = 32, **options: Any) -> list[tuple[str, int]]:
    """The all_to_alls of a step that is held to one device, and what each sent."""
    alone, x = copy.deepcopy(model), tokens(rows)
    step = flow.compile(model, squares, plan=plan, **options)
    with flow.record() as moves:
        loss: Any = step(x)
    want: Any = squares(alone, x)
    want.backward()
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    pairs: list[tuple[Any, Any]] = [*zip(model.parameters(), alone.parameters(), strict=True)]
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-10, atol=1e-11)
    return [(move.op, move.boxing.total) for move in moves if move.route == "all_to_all"]


def crossing(model: Any, rows: int = 32) -> int:
    """Pairs of a token and another rank that has an expert which it chose."""
    (layer,) = model.layers
    shares = layer.gate(tokens(rows)).softmax(-1) + layer.lean
    each = len(layer.up) // RANKS
    goes = nn.functional.one_hot(shares.topk(layer.choices, -1).indices // each, RANKS).amax(1)
    home = torch.arange(rows) * RANKS // rows
    return int(goes.sum() - goes[torch.arange(rows), home].sum())


@pytest.mark.parametrize("favourite", [None, 0, 7], ids=["all over", "all to the first", "all to the last"])
@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.sampled(2)
def test_a_token_goes_once_to_each_rank_with_experts_that_it_chose(
    gated: bool, choices: int, favourite: int | None
) -> None:
    model = Layers(choices=choices, gated=gated, favourite=favourite)
    tokens_sent = crossing(model) * WIDTH * 8 + 32 * (RANKS - 1)  # and a mark for each that might
    found = trained(model)
    assert [total for _, total in found] == [tokens_sent] * 3  # there, back, and the gradient of back
    assert len({op for op, _ in found}) == 3


@pytest.mark.parametrize(
    ("experts", "rows", "choices"),
    [(6, 13, 2), (3, 5, 2), (8, 1, 1), (2, 3, 2), (5, 9, 1)],
    ids=["uneven", "fewer experts than ranks", "one token", "fewer of both", "rest"],
)
@pytest.mark.sampled(3)
def test_experts_and_tokens_need_not_divide(experts: int, rows: int, choices: int) -> None:
    trained(Layers(experts=experts, choices=choices), rows=rows)


def test_gradients_go_on_to_what_tokens_came_from_and_tokens_may_have_more_dims() -> None:
    model = Layers(2)
    alone, x = copy.deepcopy(model), tokens(36).view(6, 6, WIDTH)
    where = flow.placement("cpu:[0-3] as (expert=4)")
    flow.nn.inside(model, use="dropless", over="expert")
    laid: Any = flow.tensor(x, placement=where, sbp=S(0)).requires_grad_()
    flow.compile(model, squares, placement=where)(laid)
    squares(alone, x.requires_grad_()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(laid.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", ["autograd", "code"])
@pytest.mark.sampled(1)
def test_backends_agree(backend: str) -> None:
    trained(Layers(), backend=backend)


def test_what_is_computed_again_is_sent_again() -> None:
    found = trained(Layers(2), PLAN + "recompute layers.*\n")
    assert len(found) == 4 + 4 + 3  # the input of all wants no gradient


@pytest.mark.parametrize(
    "plan", [PIPED, PIPED + "recompute layers.*\n", PIPED.replace("1f1b", "zb_h1")], ids=["1f1b", "again", "zb_h1"]
)
@pytest.mark.parametrize("rows", [32, 31])
@pytest.mark.sampled(2)
def test_stages_send_the_tokens_of_each_micro_batch(rows: int, plan: str) -> None:
    trained(Layers(2), plan, rows)


@pytest.mark.parametrize("rows", [32, 4096])
@pytest.mark.sampled(1)
def test_beside_another_axis_it_is_right(rows: int) -> None:
    plan = PLAN.replace("(expert=4)", "(data=2, expert=2)").replace("x <- expert=S(0)", "x <- data=S(0), expert=S(0)")
    trained(Layers(), plan, rows)


FOLDED = PLAN.replace("(expert=4)", "(data=4, expert=2 folds data)").replace("x <- expert", "x <- data")


@pytest.mark.parametrize("rows", [4096, 4100])
@pytest.mark.parametrize("more", ["", "states **: data=S(0)\n"], ids=["whole", "ZeRO-1"])
def test_where_some_ranks_of_data_share_experts_tokens_stay_with_these(rows: int, more: str) -> None:
    """Each pair of ranks sends tokens between its two; none goes to the other pair, and none is gathered."""
    found = trained(Layers(), FOLDED + more, rows)
    assert len(found) == 3
    none = "".join(
        f"expect 0 {op} over data {way}\n" for op in ("all_gather", "exchange") for way in ("forward", "backward")
    )
    flow.Plan.read(FOLDED + more + none).check(Layers(), tokens(rows), loss_fn=squares)


def test_where_nobody_says_so_tokens_stay() -> None:
    assert not trained(Layers(), PLAN.partition("inside")[0])


def processes() -> tuple[int, int]:
    found = trained(Layers(favourite=0), PLAN)
    trained(Layers(experts=3), PLAN, rows=5)
    trained(Layers(2), PIPED)
    return found[0][1], len(found)


@pytest.mark.sweep
def test_processes_do_the_same(ranks4: Ranks) -> None:
    answers = ranks4(processes)
    assert {count for _, count in answers} == {3}
    assert sum(sent for sent, _ in answers) == trained(Layers(favourite=0))[0][1]


def test_a_plan_has_the_bytes_that_are_expected_and_prints() -> None:
    model = Layers()
    step = flow.compile(model, squares, plan=PLAN)
    text = step.plan_for(tokens()).text()
    assert text.count("box(%layers.0.for_ranks, encoder='filled(share=0.5)')") == 1
    assert "by 'filled(share=0.5)'" in text
    expected = 32 * WIDTH * 8 * (RANKS - 1) // RANKS // 2  # to a rank, half of all others' tokens
    assert f"{expected / 1024:g} KiB" in str(step.plan_for(tokens()).explain().full())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"act": "tanh"}, "known are 'relu'"),
        ({"share": torch.ones(4, 1)}, "share has as many"),
        ({"down": torch.ones(2, 5, 3)}, "give up as"),
    ],
)
def test_what_is_no_layer_of_experts_is_refused(wrong: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"x": torch.ones(4, 3), "chosen": torch.zeros(4, 2, dtype=torch.long)}
    given |= {"share": torch.ones(4, 2), "up": torch.ones(2, 3, 4), "down": torch.ones(2, 4, 3)}
    with pytest.raises(flow.SbpflowError, match=why):
        flow.nn.experts(**{**given, **wrong})


def test_filled_rows_are_no_encoder_for_gradients() -> None:
    from sbpflow.boxing.encoders.named import encoder_of

    model = Layers()
    flow.nn.compress(model, {"layers.0.gate.weight": encoder_of("filled()")})
    with pytest.raises(flow.SbpflowError, match="composites say it of what they send"):
        flow.compile(model, squares, plan=PLAN).plan_for(tokens())


@pytest.mark.sweep
def test_inductor_computes_the_same() -> None:
    from torch._inductor import config

    with config.patch(compile_threads=1):  # else it leaves threads running
        trained(Layers(), backend="inductor")
        trained(Layers(2), PIPED, 31, backend="inductor")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_the_rule_of_a_layer_of_experts_holds_and_lacks_nothing(gated: bool) -> None:
    torch.manual_seed(0)
    up, down = (torch.randn(5, *shape, dtype=F64) for shape in ((3, 4 * (1 + gated)), (4, 3)))
    given = torch.randn(6, 3, dtype=F64), torch.randint(5, (6, 2)), torch.rand(6, 2, dtype=F64)
    found = flow.check_rule("sbpflow::experts", *given, up, down, "silu")
    assert str(found) == "every listed signature holds, and no other"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_a_token_goes_to_those_ranks_that_have_an_expert_it_chose(dtype: torch.dtype) -> None:
    """Also where some ranks have one more, or none; a number that is no expert's goes nowhere."""
    for count, ranks in product(range(8), range(1, 11)):
        numbers = torch.arange(-2, count + 3, dtype=dtype)
        chosen = torch.stack([numbers, numbers.flip(0)], 1)
        gone = torch.ops.sbpflow.for_ranks(torch.ones(len(chosen), 1), chosen, count, ranks)[..., 0]
        parts = [range(*nth_part(0, count, rank, ranks)) for rank in range(ranks)]
        assert gone.tolist() == [[float(a in mine or b in mine) for a, b in chosen.tolist()] for mine in parts]


def test_where_tokens_go_is_asked_by_as_many_kernels_however_many_ranks_there_are() -> None:
    x, chosen = torch.ones(6, 1), torch.zeros(6, 2, dtype=torch.long)

    def kernels(ranks: int) -> int:
        seen = Kernels()  # type: ignore[no-untyped-call]
        with seen:
            torch.ops.sbpflow.for_ranks(x, chosen, 64, ranks)
        return seen.many

    assert kernels(2) == kernels(64)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many kernels run inside."""

    many = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.many += 1
        return op(*args, **(kwargs or {}))
