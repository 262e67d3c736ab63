"""Explanations: of calls and of a graph, one kind of thing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import S
from sbpflow.boxing import Explanation
from sbpflow.placement.errors import SbpError


def of_calls() -> Explanation:
    p = flow.placement("cpu", range(2))
    x = flow.tensor(torch.ones(4, 6), placement=p, sbp=S(1))
    w = flow.tensor(torch.ones(6, 2), placement=p, sbp=S(1))
    return flow.explain(torch.matmul, x, w)


def of_a_graph() -> Explanation:
    p = flow.placement("cpu", range(2))
    step = flow.compile(nn.Linear(4, 4), placement=p)
    return step.plan_for(torch.ones(2, 4)).explain()


@pytest.mark.parametrize("of", [of_calls, of_a_graph])
def test_every_explanation_is_saved_as_page_data_and_text(of: Callable[[], Explanation], tmp_path: Path) -> None:
    said = of()
    assert json.loads(said.save(tmp_path / "deep" / "said.json").read_text()) == json.loads(json.dumps(said.dict()))
    assert said.save(tmp_path / "said.txt").read_text() == said.full() + "\n"
    assert said.save(tmp_path / "said.html").read_text() == said.html()
    assert said.html().startswith("<!DOCTYPE html>")
    assert said._repr_html_().startswith("<pre>")
    with pytest.raises(SbpError, match=r"said\.svg.*\.html, \.json, \.txt(.|\n)*draw"):
        said.save(tmp_path / "said.svg")


def test_calls_as_data_have_the_choice_and_its_moves() -> None:
    (call,) = of_calls().dict()["calls"]
    assert call["op"] == "matmul"
    assert call["chosen"] in call["choices"]
    assert set(call["chosen"]["moves"].values()) <= {"all_gather", "all_to_all", "reduce_scatter"}
    assert len(call["chosen"]["moves"]) == (call["chosen"]["bytes"] > 0) > 0
