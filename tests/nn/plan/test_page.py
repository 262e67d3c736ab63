"""The plans of published techniques, the page about the language and the gallery: all of them read."""

import re
from pathlib import Path

import pytest

from sbpflow import Plan
from sbpflow.nn.plan.language.statements import Statement
from sbpflow.nn.plan.language.words import EXAMPLES

ROOT = Path(__file__).resolve().parents[3]
GALLERY = sorted((ROOT / "examples/plans").glob("*.plan"))

PLANS = {
    "zero1": "grid (data=8)\nstates **: data=S(0)   # ZeRO-1",
    "zero2": "grid (data=8)\n{grads,states} **: data=S(0)  # 2",
    "zero3": "grid (data=8)\n**: data=S(0)       # 3, FSDP",
    "hsdp": "grid (replica=4, data=8)\n**: data=S(0)       # HSDP",
    "megatron": """
grid cuda (pipe=8, data=*, tensor=8)                              # Megatron; * is what the launcher has left
take tp_plan over tensor                                          # what the model's own config says, as signatures
model.layers.*.{input,post_attention}_layernorm -> tensor=S(1)    # sequence parallel: the result flows cut
states **: data=S(0)
pipe model.layers over pipe by interleaved v=3, 64 micro-batches
recompute model.layers.*.self_attn.core                           # selective
cast ** to bf16
cast {grads,states} ** to fp32
expect 2 all_gather and 2 reduce_scatter over tensor a layer forward
""",
    "lines": """
h.*.attn.c_attn: tensor=S(1)                                      # GPT-2 by hand
input tokens <- data=S(0), context=S(1)                           # context parallel
inside model.layers.*.self_attn use ring over context
recompute model.layers.[0:63] keep mm, attention
grid (data=8, expert=8 folds data)                                # experts over the same ranks as data
model.layers.*.mlp.experts.*: expert=S(0)
model.layers.*.mlp.experts <- expert=S(0)                         # S(tokens) to S(experts): an all_to_all appears
offload states ** to cpu ahead 2
offload saved model.layers.[8:] to cpu ahead 2
place model.vision at pipe=0
""",
    "planner": """
grid (pipe=?, data=?, tensor=8)                                   # ? and seek are the planner's
model.layers.*.mlp.*: ?
limit memory 70 GiB
seek pipe, data, recompute, schedule, micro-batches
expect gathered at once <= 2 layers
expect memory <= 40 GiB
expect time <= 1.1 of other.plan
""",
}


@pytest.mark.parametrize("name", PLANS)
def test_published_techniques_are_plans(name: str) -> None:
    plan = Plan.read(PLANS[name])
    assert str(plan) == PLANS[name]
    assert Plan.of(plan.statements).statements == plan.statements


def test_every_example_that_an_error_shows_is_right() -> None:
    said = [Plan.read(text).statements[0] for text in EXAMPLES.values()]
    assert {type(each) for each in said} == set(Statement.__args__)
    assert [str(each) for each in said] == list(EXAMPLES.values())


def test_every_statement_has_an_example_in_the_docs() -> None:
    table = (ROOT / "docs/plans.md").read_text().partition("## Statements\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (?!statement).*", table, re.MULTILINE)]
    shown = [Plan.read(text).statements[0] for row in rows for text in re.findall(r"`([^`]+)`", row[1])]
    assert {type(each) for each in shown} == set(Statement.__args__)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: str(path.stem))
def test_a_plan_of_the_gallery_reads_and_says_what_it_is(path: Path) -> None:
    plan = Plan.load(path)
    first, *_ = plan.lines
    assert first.statement is None
    assert first.comment
    assert [str(each) for each in plan.statements] == [
        " ".join(line.text.partition("#")[0].split()) for line in plan.lines if line.statement
    ]
