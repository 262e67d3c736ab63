"""Notebooks: values show themselves as HTML in which the user's words are escaped, and that of the examples runs."""

import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P
from sbpflow.boxing.html import MOST, code, table

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
WORSE = "<script>alert(1)</script> & '\""


def parsed(shown: Any) -> str:
    """The HTML of a value in a notebook, which is well formed; in one text without marks."""
    page = ET.fromstring(f"<div>{shown._repr_html_()}</div>")
    assert not page.findall(".//script")
    return " ".join(page.itertext())


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(net(x).square().mean())


def test_a_plan_is_shown_as_it_is_written() -> None:
    plan = flow.Plan.read(f"grid (data=2)  # {WORSE}\n")
    shown = parsed(plan)
    assert shown.startswith("grid (data=2)")
    assert f"# {WORSE}" in shown


def test_a_check_shows_moves_expectations_and_the_map() -> None:
    plan = flow.Plan.read("grid (data=2)\nexpect memory <= 1 GiB")
    checked = plan.check(model(), torch.empty(4, 8, device="meta"), loss_fn=loss_fn)
    shown = parsed(checked)
    assert "holds" in shown
    assert "expect memory" in shown
    assert all(move.route in shown for move in checked.moves)
    assert "how the weights are kept on each axis" in shown  # the map


def test_a_prediction_shows_figures_and_parts() -> None:
    found = flow.predict(
        model(), torch.empty(4, 8, device="meta"), "grid cuda (data=2)", cluster="h100x8", loss_fn=loss_fn
    )
    shown = parsed(found)
    assert "2 x H100, fits" in shown
    assert "of the peak" in shown
    assert "products" in shown


def test_a_search_shows_the_plan_and_what_was_tried() -> None:
    batch = torch.empty(4, 8, device="meta")
    found = flow.find_plan(model(), batch, plan="grid (data=2)", cluster="flat", loss_fn=loss_fn)
    shown = parsed(found)
    assert "found: " in shown
    assert all(one.why in shown for one in found.runners_up)
    assert found.text.splitlines()[0] in shown


def test_a_record_shows_each_move() -> None:
    place = flow.placement("cpu", range(2))
    with flow.record() as moves:
        pass
    assert parsed(moves) == "nothing moved"
    with flow.record() as moves:
        flow.ones(2, 2, placement=place, sbp=P).to_global(sbp=B)
    shown = parsed(moves)
    assert "(P,) -> (B,)" in shown
    assert "test_notebook.py" in shown
    assert "2 moves: 16 bytes to a rank" in shown


def test_a_boxing_plan_shows_its_moves() -> None:
    place = flow.placement("cpu", range(4))
    shown = parsed(flow.boxing.between(flow.layout(place, "P", (8, 8)), flow.layout(place, "S(1)", (8, 8))))
    assert "reduce_scatter over 0" in shown
    assert "192 B" in shown


def test_a_table_has_words_of_the_user_escaped_and_ends() -> None:
    made = table([WORSE], [[WORSE]] * (MOST + 3))
    page = ET.fromstring(f"<div>{made}</div>")
    assert len(page.findall(".//td")) == MOST
    assert "and 3 more" in made
    assert "<script>" not in made + code(WORSE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_short(path: Path) -> None:
    import nbformat

    book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")
    assert len(path.read_bytes()) < 20_000
    assert str(ROOT) not in path.read_text()
    assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of jupyter_client and zmq
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    # The kernel of this very Python, whatever others a machine has under the name.
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "tests", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
        outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
        kinds = {kind for output in outputs for kind in output.get("data", {})}
        assert {"text/html", "image/svg+xml"} <= kinds
        assert not [output for output in outputs if output.get("name") == "stderr"], path
