"""Roles of each module on each axis are told in words that people use, and code is named as a reader finds it."""

from pathlib import Path

import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.figures import user_path
from sbpflow.boxing.graph.report.roles import roles_of
from sbpflow.sbp import Sbp
from tests.boxing.graph.gpt import gpt, piped
from tests.nn.graph.graphs import GRAPHS, LINE, Build, aten, total

GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
MEGATRON = {
    "wte": "vocabulary parallel",
    "blocks.*.ln_attn": "replicated",
    "blocks.*.attn.qkv": "column parallel",
    "blocks.*.attn attention": "heads split",
    "blocks.*.attn.proj": "row parallel",
    "blocks.*.mlp.fc": "column parallel",
    "blocks.*.mlp.proj": "row parallel",
    "head": "column parallel",
}


def test_the_words_of_a_gpt_as_megatron_and_data_parallelism_have_it() -> None:
    told = {role.module: role for role in roles_of(gpt(12))}
    for module, word in MEGATRON.items():
        assert told[module].words == ("data parallel", word)
        assert told[module].axes == ("data", "tensor")
        assert told[module].count == (12 if "*" in module else 1)
    assert told["blocks.*.mlp.fc"].sbp == (B, S(0))
    assert sum(role.numel * role.count for role in told.values()) > 80e6


@pytest.mark.parametrize("name", ["data parallel", "ZeRO-2", "ZeRO-3"])
def test_the_words_of_sharded_and_plain_data_parallelism(name: str) -> None:
    assert {role.words for role in roles_of(GRAPHS[name]())} == {(name,)}


def test_stages_of_a_pipeline_are_told_apart() -> None:
    assert [(role.module, role.words, len(role.placements)) for role in roles_of(piped())] == [
        ("stages.0.fc", ("ZeRO-3",), 1),
        ("stages.1.fc", ("ZeRO-2",), 1),
    ]


@pytest.mark.parametrize(
    ("sbp", "word"), [(S(0), "data parallel"), (S(1), "sequence parallel"), (S(2), "features split"), (B, "replicated")]
)
def test_the_words_of_whole_weights_follow_what_they_are_applied_to(sbp: Sbp, word: str) -> None:
    b = Build(LINE)
    x, w = b.input("x", (4, 4, 4), sbp), b.source("w", (1,), B)
    made = b.graph(total(b, b.op(aten.prelu.default, x, w, out=sbp), B if sbp is B else P))
    assert [role.words for role in roles_of(made)] == [(word,)]


def test_a_summary_of_a_large_model_is_30_lines_and_names_no_folder_of_packages(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, vocab_size=64, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    adamw = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, lambda m, ids: m(input_ids=ids, labels=ids).loss, adamw, placement=GRID)
    planned = step.plan_for(torch.zeros(8, 6, dtype=torch.long)).explain()
    assert len(str(planned).splitlines()) <= 30
    assert len(str(planned)) < 5000 < len(planned.full())
    for text in (str(planned), planned.full(), planned.html(), step.draw(tmp_path / "step.svg").read_text()):
        assert "transformers/models/llama/modeling_llama.py" in text
        assert "site-packages" not in text


def test_a_line_of_the_users_is_told_from_where_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert user_path(f"{__file__}:3") == "test_roles.py:3"
    assert user_path("/elsewhere/train.py:3") == "/elsewhere/train.py:3"
    assert user_path(f"{torch.__file__}:3") == "torch/__init__.py:3"
