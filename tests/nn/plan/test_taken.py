"""Plans of transformers' configs, taken as lines, lie as transformers itself would cut the weights, and train right."""

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sbpflow as flow
from sbpflow.nn.model.annotate import hints_of
from sbpflow.nn.plan.taken import STYLES, taken
from sbpflow.placement.errors import SbpError
from tests.nn.families import FAMILIES, made
from tests.nn.plan.families import FEW, WITH_A_PLAN, Column, compiled, outcome

# transformers says which kernels of others it does not find, and warns of its own names.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [
    *((name, "tp_plan") for name in WITH_A_PLAN),
    *((name, "ep_plan") for name in ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")),
]
ON_TWO = "grid (tensor=2)\ntake tp_plan over tensor"
LIKE_LLAMA = ["arcee", "glm4", "granite", "llama", "mistral", "nemotron", "olmo", "qwen2", "qwen3", "smollm3"]


def noted(model: nn.Module, lines: list[str]) -> nn.Module:
    """The model with notes of what the lines say of its weights, on two ranks."""
    flow.compile(model, plan="\n".join(["grid (tensor=2)", *lines]))
    return model


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of torch, of which there is one, and which send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_a_line_for_each_entry_of_the_plan() -> None:
    assert taken(made("llama"), "tensor") == [
        "lm_head: tensor=S(0)  # colwise_gather_output",
        "lm_head -> tensor=B  # colwise_gather_output",
        "model.embed_tokens: tensor=S(0)  # embedding_rowwise",
        "model.layers.*.self_attn.q_proj: tensor=S(0)  # colwise",
        "model.layers.*.self_attn.k_proj: tensor=S(0)  # colwise",
        "model.layers.*.self_attn.v_proj: tensor=S(0)  # colwise",
        "model.layers.*.self_attn.o_proj: tensor=S(1)  # rowwise",
        "model.layers.*.mlp.gate_proj: tensor=S(0)  # colwise",
        "model.layers.*.mlp.up_proj: tensor=S(0)  # colwise",
        "model.layers.*.mlp.down_proj: tensor=S(1)  # rowwise",
    ]


def test_a_bias_of_rows_is_whole_and_one_of_columns_cut() -> None:
    lines = taken(made("phi"), "tensor")
    assert "model.layers.*.self_attn.q_proj: tensor=S(0)  # colwise" in lines
    assert "model.layers.*.self_attn.dense.weight: tensor=S(1)  # rowwise" in lines
    assert "model.layers.*.self_attn.dense.bias: tensor=B  # rowwise" in lines


def test_experts_are_cut_inside_by_one_plan_and_shared_out_by_the_other() -> None:
    model = made("mixtral")
    experts = "model.layers.*.mlp.experts"
    assert taken(model, "tensor")[-3:] == [
        f"{experts}.gate_up_proj: tensor=S(1)  # packed_colwise",
        f"{experts}.down_proj: tensor=S(2)  # rowwise",
        f"# {experts}: moe_tp_experts, addends are summed where a sum is needed",
    ]
    assert taken(model, "expert", "ep_plan") == [
        f"{experts}.gate_up_proj: expert=S(0)  # grouped_gemm",
        f"{experts}.down_proj: expert=S(0)  # grouped_gemm",
        f"# {experts}: ep_dispatch_experts, its weights say it",
    ]


def test_layers_are_piped_and_the_rest_goes_along() -> None:
    assert taken(made("llama"), "pipe", "pp_plan") == [
        "pipe model.layers over pipe  # pp_plan",
        "# lm_head: where its neighbours are",
        "# model.embed_tokens: where its neighbours are",
        "# model.norm: where its neighbours are",
    ]


def test_what_the_model_does_not_have_is_a_comment() -> None:
    lines = taken(made("qwen2_moe"), "tensor")
    assert "# model.layers.*.mlp.gate_proj: colwise, not in this model" in lines


def test_packed_projections_are_gathered_where_that_is_needed_and_logits_are() -> None:
    lines = taken(made("phi3"), "tensor")
    packed = "model.layers.*.self_attn.qkv_proj"
    assert f"{packed}: tensor=S(0)  # colwise_gather_output, gathered where that is needed" in lines
    assert [line for line in lines if "->" in line] == ["lm_head -> tensor=B  # colwise_gather_output"]


def test_a_model_in_another_is_taken_by_its_path() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made("llama")

    assert taken(Wrapped(), "t")[2] == "inner.model.embed_tokens: t=S(0)  # embedding_rowwise"
    assert taken(Wrapped(), "t", "pp_plan")[0] == "pipe inner.model.layers over t  # pp_plan"


class Styled(nn.Module):
    """A model with a plan of its own."""

    def __init__(self, **plan: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4))])
        self._tp_plan = {f"layers.*.{name[1:]}": style for name, style in plan.items()}


def test_a_norm_of_sequence_parallelism_is_whole_and_its_tokens_are_cut() -> None:
    assert taken(Styled(_1="sequence_parallel"), "tensor") == [
        "layers.*.1: tensor=B  # sequence_parallel",
        "layers.*.1 <- tensor=S(1)  # sequence_parallel",
        "layers.*.1 -> tensor=S(1)  # sequence_parallel",
    ]


def test_an_embedding_by_words_or_by_width() -> None:
    assert taken(Styled(_2="embedding_rowwise"), "t") == ["layers.*.2: t=S(0)  # embedding_rowwise"]
    assert taken(Styled(_2="embedding_colwise"), "t")[0].startswith("layers.*.2: t=S(1)")


def test_a_style_for_a_parameter_alone_goes_before_that_of_its_module() -> None:
    model = Styled(_0="rowwise")
    model._tp_plan["layers.*.0.bias"] = "colwise"
    noted(model, taken(model, "tensor"))
    hints = hints_of({"": model})
    assert hints["layers.0.0.weight"] == {"tensor": flow.S(1)}
    assert hints["layers.0.0.bias"] == {"tensor": flow.S(0)}


def test_every_style_of_transformers_is_known() -> None:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    importlib.import_module("transformers.integrations.tensor_parallel")  # which registers them
    assert set(ALL_PARALLEL_STYLES) <= STYLES.keys()


def test_an_unknown_style_is_an_error_whose_fix_works() -> None:
    model = Styled(_0="rowwise", _1="diagonal")
    with pytest.raises(SbpError, match=r"layers.\*.1 of Styled is 'diagonal', which is no known style") as caught:
        taken(model, "t")
    fix = str(caught.value).splitlines()[-1]
    exec(fix[fix.index("del") : fix.index(", and say")], {"model": model})
    assert taken(model, "t")


@pytest.mark.parametrize(("name", "lines"), [
    ("gpt2", ["transformer.h.*.attn.c_attn.weight: tensor=S(1)", "transformer.h.*.mlp.c_proj.weight: tensor=S(0)"]),
    ("bert", ["bert.encoder.layer.*.attention.self.query.weight: tensor=S(0)",
              "bert.encoder.layer.*.output.dense.weight: tensor=S(1)"]),
    ("t5", ["encoder.block.*.layer.0.SelfAttention.q.weight: tensor=S(0)",
            "encoder.block.*.layer.1.DenseReluDense.wo.weight: tensor=S(1)"]),
])  # fmt: skip
def test_a_model_without_a_plan_is_an_error_with_lines_by_hand(name: str, lines: list[str]) -> None:
    model = made(name)
    with pytest.raises(SbpError, match=f"take tp_plan: {type(model).__name__} has none") as caught:
        taken(model, "tensor")
    said = [line.strip() for line in str(caught.value).splitlines()]
    assert f"such plans come from transformers: base_model_tp_plan of {type(model.config).__name__} is not set" in said
    assert said[-2:] == lines
    cut = [path for path, hint in hints_of({"": noted(model, lines)}).items() if hint]
    assert len(cut) == 2 * len(lines)  # of two layers


def test_a_plan_of_heads_alone_is_an_error() -> None:
    model: Any = made("llama")
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(SbpError, match="that of LlamaForCausalLM says nothing of its layers, only of lm_head"):
        taken(model, "tensor")


@pytest.mark.parametrize("what", ["ep_plan", "pp_plan", "sp_plan"])
def test_other_plans_that_are_missing_are_errors(what: str) -> None:
    with pytest.raises(SbpError, match=f"take .?{what}"):
        taken(nn.Linear(2, 2), "tensor", what)


@pytest.mark.parametrize(("name", "what"), CASES)
def test_weights_lie_as_transformers_cuts_them(name: str, what: str, mesh: DeviceMesh) -> None:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    model: Any = made(name)
    hints = hints_of({"": noted(model, taken(model, "tensor", what))})
    each = model._expand_parallel_plan(getattr(model, what))
    for full, value in list(model.named_parameters()):
        holder, _, short = full.rpartition(".")
        if full in each:
            ALL_PARALLEL_STYLES[each[full]].shard_param(model.get_submodule(holder), short, mesh)
        placed = getattr(model.get_parameter(full), "placements", [None])[0]
        mine: Any = hints.get(full, {})
        dim = getattr(placed, "dim", None)
        assert getattr(mine.get("tensor"), "dim", None) == (None if dim is None else dim % value.ndim), full


@pytest.mark.sampled(1, sweep=41)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_step_gives_what_one_device_gives(name: str, what: str, ranks: int) -> None:
    assert outcome(name, Column(f"grid (tensor={ranks})\ntake {what} over tensor", FEW)) == "right"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_a_layer_sums_twice_forward(name: str) -> None:
    """Each rank has whole heads and columns, and what rows leave is summed: that is all that a layer sends."""
    model: Any = made(name)
    sent = Counter[str]()
    for row in compiled(model, ON_TWO).plan_for(**FAMILIES[name].batch()).explain().moves:
        if row.direction == "forward" and not row.free and "layers." in row.name:
            sent[row.route] += row.count
    assert sent == {"all_reduce_once over tensor": 2 * model.config.num_hidden_layers}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mixtral", "phi3"])
def test_packed_projections_are_cut_in_their_halves(name: str) -> None:
    """S of the rows, gate above up, does not say where a rank's rows are: here it has some of each."""
    graph = compiled(made(name), ON_TWO).plan_for(**FAMILIES[name].batch()).physical
    packed = {"mixtral": "mlp.experts.gate_up_proj", "phi3": "mlp.gate_up_proj.weight"}[name]
    layout = graph.layout(f"model.layers.1.{packed}")
    rows = 1 if name == "mixtral" else 0
    assert layout.sbp == (flow.S(rows),)
    assert layout.state.dims[rows] == (-2, 0)
