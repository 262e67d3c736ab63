"""Dropless experts: tokens go to the ranks of the experts that they chose, and all is as on one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
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
    return [(move.op, move.plan.total) for move in moves if move.route == "all_to_all"]


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
    text = step.plan(tokens()).text()
    assert text.count("box(%layers.0.for_ranks, encoder='filled(share=0.5)')") == 1
    assert "by 'filled(share=0.5)'" in text
    expected = 32 * WIDTH * 8 * (RANKS - 1) // RANKS // 2  # to a rank, half of all others' tokens
    assert f"{expected / 1024:g} KiB" in str(step.plan(tokens()).explain().full())


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
        flow.compile(model, squares, plan=PLAN).plan(tokens())


def logits_squared(model: nn.Module, ids: Tensor) -> Tensor:
    """Transformers computes its own losses in single precision."""
    out: Tensor = model(input_ids=ids, use_cache=False).logits.square().mean()
    return out


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("laid", ["**.experts.*: data=S(0)", "take ep_plan over data"], ids=["by hand", "ep_plan"])
@pytest.mark.sampled(1)
def test_experts_of_transformers_are_sent_their_tokens(laid: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("sbpflow", flow.nn.experts_of)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    some = {"num_local_experts": 8} if kind == "mixtral" else {"num_experts": 8, "moe_intermediate_size": 24}
    config = transformers.AutoConfig.for_model(
        kind, num_hidden_layers=1, vocab_size=64, num_experts_per_tok=2, **sizes, **some
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=F64)
    alone = copy.deepcopy(model)
    alone.set_experts_implementation("eager")
    model.set_experts_implementation("sbpflow")
    plan = f"grid (data=4)\ninput * <- data=S(0)\n{laid}\ninside **.experts use dropless over data\n"
    step = flow.compile(model, logits_squared, plan=plan)
    ids = torch.randint(64, (8, 6))
    with flow.record() as moves:
        loss: Any = step(ids)
    want = logits_squared(alone, ids)
    want.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        # The router's shares are single precision, whatever the model is.
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-6, atol=1e-8)
    sent = [move.plan.total for move in moves if move.route == "all_to_all"]
    assert len(sent) == 4
    assert max(sent) < 48 * 32 * 8 * 3 * 2 // 3  # no more than two of four ranks have experts of a token
    assert [len(held) for held in model.model.layers[0].mlp.experts.down_proj.to_local()] == [2] * 4


class Rows(nn.Module):
    """A layer of experts as transformers writes them, before it says what it has."""

    act: Any = nn.SiLU

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * INNER, WIDTH, dtype=F64))
        self.down_proj = nn.Parameter(torch.randn(4, WIDTH, INNER, dtype=F64))
        self.act_fn = self.act()

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        return x


class Clamped(Rows):
    def _apply_gate(self, wide: Tensor) -> Tensor:
        gate, other = wide.clamp(-1, 1).chunk(2, -1)
        return self.act_fn(gate) * other  # type: ignore[no-any-return]


class Deeper(Clamped):
    """Its gate is that of the class above."""


class Squared(Rows):
    act: Any = nn.Tanh


class Actless(Rows):
    def act(self) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        (Rows, {"has_bias": True}, "Rows has biases$"),
        (Rows, {"has_gate": False}, "Rows has no gate$"),
        (Rows, {"is_concatenated": False}, "Rows has gates between what they open$"),
        (Rows, {"has_post_expert_norm": True}, "Rows has a norm behind each expert$"),
        (Clamped, {}, "Clamped has a gate of its own$"),
        (Deeper, {}, "Deeper has a gate of its own$"),
        (Squared, {}, "Squared has Tanh as act_fn$"),
        (Actless, {}, "Actless has no act_fn$"),
        (Squared, {"has_bias": True}, "Squared has biases, Tanh as act_fn$"),
    ],
)
def test_experts_that_are_more_than_two_products_and_a_gate_are_refused(
    kind: type[nn.Module], said: dict[str, bool], why: str
) -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.moe import use_experts_implementation

    module: Any = use_experts_implementation(type(kind.__name__, (kind,), {}), **said)(None)
    with pytest.raises(flow.SbpError, match=f"(?m){why}"):
        flow.nn.experts_of(module, tokens(3), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1, dtype=F64))


def test_a_module_without_experts_is_refused_and_the_fix_works() -> None:
    given: Any = tokens(3), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1, dtype=F64)
    layer = Layer()
    for module in (nn.Linear(WIDTH, WIDTH), layer):
        with pytest.raises(flow.SbpError, match=f"{type(module).__name__} says no has_gate.*\n.*flow.nn.experts"):
            flow.nn.experts_of(module, *given)
    assert flow.nn.experts(given[0], given[1], given[2], layer.up, layer.down).shape == (3, WIDTH)


def test_a_model_of_transformers_with_other_experts_is_refused_and_the_fix_works() -> None:
    """It was an AttributeError of a module that nobody had heard of."""
    pytest.importorskip("transformers")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from tests.nn.families import made

    ALL_EXPERTS_FUNCTIONS.register("sbpflow", flow.nn.experts_of)
    model: Any = made("gpt_oss")
    model.set_experts_implementation("sbpflow")
    ids = torch.randint(64, (2, 6))
    with pytest.raises(flow.SbpError, match="GptOssExperts has biases, gates between what they open") as caught:
        model(ids)
    exec(str(caught.value).partition("another way, ")[2], {"model": model})
    assert model(ids).logits.isfinite().all()


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
