"""Device families: a kind of device more is a row more, and one that this machine lacks can be planned for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.placement.device import FAMILIES, DeviceFamily, family
from sbpflow.placement.world import device

ROOT = Path(flow.__file__).parent.parent
ROOMS = ("placement", "sbp", "boxing", "actors", "nn")
# Words of prose: examples in errors, and a field's default.
NAMED = {"placement/device.py", "placement/hardware.py", "placement/doctor.py", "nn/plan/language/words.py"}


def names_of(code: ast.AST) -> Iterator[str]:
    """Attributes, names and texts of code, without docstrings."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(code)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_a_kind_of_device_is_named_in_its_row_alone() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if any(name in ("cuda", "is_cuda") for name in names_of(ast.parse(path.read_text("utf-8"))))
    }
    assert found <= NAMED


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> DeviceFamily:
    """Another kind of card, which torch knows and this machine lacks."""
    row = DeviceFamily("xpu", "XPU", True, "xccl", torch._C.DispatchKey.AutocastXPU, 25 * 2**20, "h100x8")
    monkeypatch.setitem(FAMILIES, "xpu", row)
    return row


def test_a_model_is_planned_for_a_card_that_is_not_here(xpu: DeviceFamily) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to("meta")
    found = flow.plan(model, torch.empty(32, 64, device="meta"), plan="grid xpu (data=4)\ninput ** <- data=S(0)")
    assert "grid xpu (data=4)" in str(found)


def test_its_tensors_ask_for_it(xpu: DeviceFamily) -> None:
    with pytest.raises(flow.PlacementError, match="needs XPU, which torch does not find here"):
        device(flow.placement("xpu", range(2)), 0)


@pytest.mark.skipif(family("cuda").here, reason="this machine has such a card")
def test_what_needs_a_missing_card_names_the_line_and_where_it_can_run() -> None:
    model = nn.Linear(64, 8)
    graph = flow.compile(
        model, lambda m, x: m(x).mean(), None, placement=flow.placement("cuda:[0-3] as (data=2, tensor=2)")
    )
    with pytest.raises(flow.PlacementError, match="needs CUDA") as raised, torch.no_grad():
        graph(torch.zeros(32, 64))
    _, line, way = str(raised.value).splitlines()
    assert f"{__file__}:{raised.traceback[0].lineno + 1}" in line
    host = eval(way[way.index("placement(") : way.index(";")], {"placement": flow.placement})
    with torch.no_grad():
        assert (
            flow.compile(model, lambda m, x: m(x).mean(), None, placement=host)(torch.zeros(32, 64)).placement is host
        )


def test_a_gpu_is_taken_for_the_first_kind_of_card(xpu: DeviceFamily) -> None:
    with pytest.raises(flow.PlacementError, match="known are cpu, cuda, xpu; did you mean 'cuda'"):
        flow.placement("gpu", range(2))


def test_the_host_draws_by_torchs_own_generator() -> None:
    torch.manual_seed(5)
    assert family("cpu").seed() == 5
    before = family("cpu").random_state()
    first = torch.rand(3)
    family("cpu").set_random_state(before)
    assert torch.equal(torch.rand(3), first)
