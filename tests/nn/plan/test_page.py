"""The plans of published techniques, the page about the language and the gallery: all of them read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sbpflow import Plan
from sbpflow.nn.plan.language.statements import STATEMENTS
from sbpflow.nn.plan.language.syntax_error import examples

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
    said = [Plan.read(text).statements[0] for text in examples().values()]
    assert {type(each) for each in said} == {*STATEMENTS}
    assert [str(each) for each in said] == [*examples().values()]


def table() -> Iterator[str]:
    """The rows of the statements, a kind of them each."""
    yield from ("| statement | an example | says |", "|---|---|---|")
    names = [form.heads[0].split()[0] if form.heads[0][0].isalpha() else kind.__name__.lower() for kind, form in FORMS]
    for before, name, (_, form) in zip(["", *names], names, FORMS, strict=False):
        shown = ", ".join(f"`{text}`" for text in [*form.examples][: len(form.heads)])
        yield f"| {'' if name == before else name} | {shown} | {form.says} |".replace("|  |", "| |")


FORMS = [(kind, kind.form) for kind in STATEMENTS]


def test_the_table_in_the_docs_is_made_of_the_examples() -> None:
    page = (ROOT / "docs/plans.md").read_text()
    assert "\n".join(table()) in page, f"docs/plans.md has to have\n\n{chr(10).join(table())}\n"


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: str(path.stem))
def test_a_plan_of_the_gallery_reads_and_says_what_it_is(path: Path) -> None:
    plan = Plan.load(path)
    first, *_ = plan.lines
    assert first.statement is None
    assert first.comment
    assert [str(each) for each in plan.statements] == [
        " ".join(line.text.partition("#")[0].split()) for line in plan.lines if line.statement
    ]
