"""Device families: a kind of device more is a row more, and one that this machine lacks can be planned for."""

import ast
import os
import shutil
import subprocess
import sys
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
# Beside the row itself a field's default and an example.
NAMED = {"placement/device.py", "placement/hardware.py", "nn/plan/language/statements/grid.py"}


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
    found = flow.find_plan(model, torch.empty(32, 64, device="meta"), plan="grid xpu (data=4)\ninput ** <- data=S(0)")
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
    with pytest.raises(flow.PlacementError, match="known are cpu, cuda, xpu\n  did you mean 'cuda'"):
        flow.placement("gpu", range(2))


def test_the_host_draws_by_torchs_own_generator() -> None:
    torch.manual_seed(5)
    assert family("cpu").seed() == 5
    before = family("cpu").random_state()
    first = torch.rand(3)
    family("cpu").set_random_state(before)
    assert torch.equal(torch.rand(3), first)


ROW = """
        DeviceFamily("npu", "an NPU", True, "hccl", torch._C.DispatchKey.AutocastPrivateUse1, 25 * 2**20, "h100x8"),
"""
CLUSTER = """
name = "npux4"
levels = [{ name = "node", size = 4, latency = 1e-6, bandwidth = 1e11 }]
device = { name = "NPU", type = "npu", memory = 64e9, memory_bandwidth = 1e12, flops = { float32 = 1e14 } }
"""
PLAN = """
grid npu (pipe=2, data=2)
input ** <- data=S(0)
pipe layers over pipe by 1f1b, 4 micro-batches
offload states ** to cpu
"""
SCRIPT = """
import torch
torch.utils.rename_privateuse1_backend("npu")
from torch import nn
import sbpflow as flow

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.drop = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(layer(x)) + torch.rand(64, device=x.device)
        return x.square().mean()

with torch.device("meta"):
    model, x = Model(), torch.empty(16, 64)
print(flow.find_plan(model, x, plan=open("npu.plan").read(), cluster="npu.toml"))
print(flow.Plan.load("npu.plan").check(model, x))
with flow.use_cluster("npu.toml"):
    step = flow.compile(Model(), lambda model, x: model(x), None, placement=flow.placement("npu", range(4)))
    planned = step.plan_for(torch.zeros(16, 64))
    print(planned.explain())
    planned.draw("step.dot")
print(open("step.dot").read())
try:
    step(torch.zeros(16, 64))
except flow.PlacementError as error:
    print(error)
"""


def test_a_new_kind_of_device_is_one_row_in_one_file(tmp_path: Path) -> None:
    for room in (*ROOMS, "sbpflow"):
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "placement" / "device.py"
    before, rows, after = table.read_text("utf-8").partition("    for row in (\n")
    table.write_text(before + rows + ROW + after, "utf-8")
    for name, text in {"npu.toml": CLUSTER, "npu.plan": PLAN, "script.py": SCRIPT}.items():
        (tmp_path / name).write_text(text, "utf-8")
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for told in ("grid npu (pipe=2, data=2)", "on npu:[0-3]", "digraph", "needs an NPU", 'use placement("cpu:[0-3]")'):
        assert told in run.stdout
