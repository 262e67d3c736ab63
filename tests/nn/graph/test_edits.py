"""A compiled step goes by what its model, optimizer and loss are now, as plain torch does."""

import pathlib

import pytest
import torch

import sbpflow as flow
from sbpflow.nn.graph.reads.recaptures import KEPT
from tests.nn.graph.edits import EDITS, Edit, Scene, numbers
from tests.nn.graph.paths import TRAINING, Path


def alike(one: Scene, other: Scene, steps: int) -> None:
    """Both train alike, to the values that they have behind each step."""
    for at in range(steps):
        x, y = numbers(8, 6, seed=10 + at), numbers(8, 6, seed=20 + at)
        torch.testing.assert_close(other.train(x, y), one.train(x, y))
        found, wanted = other.values(), one.values()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def test_the_table_in_the_docs_has_what_is_tried_here() -> None:
    page = pathlib.Path("docs/reference/captured.md").read_text()
    assert all(f"| {edit.says} |" in page for edit in EDITS if edit.says)


def test_plans_of_training_and_of_evaluation_are_both_kept() -> None:
    scene, x = Scene("graph"), numbers(8, 6)
    steps = set()
    for at in range(6):
        scene.model.train(at % 2 == 0)
        scene.train(x, x)
        steps.add(id(scene.step.planned))
    assert len(steps) == 2


def test_a_number_that_is_another_at_each_step_is_right_and_told_of_once() -> None:
    plain, made = Scene("plain"), Scene("graph")

    def anneal() -> None:
        for at in range(7):
            plain.put_alpha(1.0 + at)
            made.put_alpha(1.0 + at)
            alike(plain, made, 1)

    with pytest.warns(UserWarning, match="alpha, which loss of edits.py closes over") as told:
        anneal()
    assert len(told) == 1


def heated() -> flow.nn.Graph:
    model = torch.nn.Linear(3, 3)
    return flow.compile(model, lambda model, x, how: (model(x) * how["t"]).sum(), placement=flow.placement("cpu", [0]))


def test_a_number_among_arguments_that_is_another_at_each_step_is_told_of_once_and_few_plans_are_kept() -> None:
    step, x = heated(), torch.ones(2, 3)
    once = step(x, {"t": 1.0}).full_tensor()

    def anneal() -> None:
        for t in range(2, 12):
            torch.testing.assert_close(step(x, {"t": float(t)}).full_tensor(), once * t)

    with pytest.warns(UserWarning, match=r"for the 4th time.*\n?.*the argument how \(4.0, and now 5.0\)") as told:
        anneal()
    assert len(told) == 1
    assert len(step._steps) == KEPT


def test_numbers_among_arguments_that_come_again_are_captured_once() -> None:
    step, x = heated(), torch.ones(2, 3)
    found = []
    for at in range(12):
        step(x, {"t": float(at % 3)})
        found.append(id(step.planned))
    assert found == found[:3] * 4


@pytest.mark.sampled(30, sweep=200)
@pytest.mark.filterwarnings("ignore:.*plain attributes that a forward sets")  # of pruning
@pytest.mark.parametrize("mode", ["eager", *TRAINING], ids=str)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_a_step_is_as_in_torch_after_an_edit(edit: Edit, mode: str | Path) -> None:
    if mode == "eager" and not edit.eager:
        pytest.skip("global tensors are no such thing")
    plain, made = Scene("plain"), Scene("graph", path=mode) if isinstance(mode, Path) else Scene(mode)
    alike(plain, made, 2)
    if isinstance(mode, Path) and mode.stages == 2 and not edit.staged:
        with pytest.raises(flow.PlacementError, match="on different placements"):
            edit.change(made)
        return
    for _ in range(1 + edit.again):
        edit.change(plain)
        edit.change(made)
        alike(plain, made, 2)
