"""Each pass of a step writes what it gives, in the order of the table, where somebody asks for it."""

import sys
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.graph.passes import PASSES, Pass


def trained(name: str = "net", **options: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if options:
        flow.nn.place(model[:2], flow.placement("cpu", [0]))
        flow.nn.place(model[2:], flow.placement("cpu", [1]))
    else:
        options = {"placement": flow.placement("cpu", range(2))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, lambda model, x, y: F.mse_loss(model(x), y), optimizer, name=name, **options)
    step(torch.ones(4, 4), torch.ones(4, 2))


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["straight", "pipeline"])
def test_passes_write_what_they_give(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBPFLOW_DUMP", str(tmp_path))
    trained(**options)
    (folder,) = (tmp_path / "rank0").iterdir()
    texts = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    assert [name[3:-4] for name in texts] == [p.name for p in PASSES if options or p.name != "microbatch"]
    assert all(text.strip() for text in texts.values())
    assert "aten.linear.default(%0, %2, %3): float32 (4, 8)" in texts["01-captured.txt"]
    assert "aten.linear.default: B, B, B -> B, one of " in texts["05-chosen.txt"]


def test_nothing_is_written_where_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SBPFLOW_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    trained()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["straight", "pipeline"])
def test_the_table_has_the_functions_that_are_called_in_their_order(options: dict[str, Any]) -> None:
    table = {each.made_by.__code__: each.name for each in PASSES}
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in table:
            called.setdefault(table[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        trained(f"in order {len(options)}", **options)  # a plan of another name is not known yet
    finally:
        sys.setprofile(before)
    missing = "order" if options else "microbatch"  # a pipeline has tasks in the place of one order
    assert list(called) == [each.name for each in PASSES if each.name != missing]


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_the_table_says_where_its_functions_are(each: Pass) -> None:
    assert resolve_name(f"sbpflow.{each.by}") is each.made_by
