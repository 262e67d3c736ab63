"""Notes on what lies on the host: patterns, what takes them back, and what is refused."""

import copy

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.model.offload import saved_offloads, state_offloads
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.logical import SavedOffload


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def test_states_are_noted_of_parameters_and_of_all_in_modules() -> None:
    model = net()
    assert flow.nn.offload(model, ["0.weight", "1"]) is model
    assert state_offloads({"": model}) == {"0.weight": "cpu", "1.0.weight": "cpu", "1.0.bias": "cpu"}
    flow.nn.offload(model, "*.weight", to="disk")
    assert state_offloads({"": model})["1.0.weight"] == "disk"
    assert state_offloads({"model": copy.deepcopy(model)})["model.1.0.bias"] == "cpu"
    flow.nn.offload(model, "**", to=None)
    assert state_offloads({"": model}) == {}
    assert not any(key.startswith("_sbpflow") for part in model.modules() for key in part.__dict__)


def test_what_is_saved_is_noted_of_modules_and_all_in_them() -> None:
    model = net()
    flow.nn.offload(model, "1", "saved", ahead=3)
    assert saved_offloads({"m": model}) == dict.fromkeys(["m.1", "m.1.0", "m.1.1"], SavedOffload("cpu", 3))
    flow.nn.offload(model, "*", "saved", to="disk")  # said later of more
    assert set(saved_offloads({"": model}).values()) == {SavedOffload("disk", 1)}
    assert "" in saved_offloads({"": model})
    flow.nn.offload(model, "1.1", "saved", to=None)
    assert set(saved_offloads({"": model})) == {"", "0", "1", "1.0", "2"}


def test_a_tied_parameter_is_offloaded_under_all_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    flow.nn.offload(model, "b.weight")
    assert state_offloads({"": model}) == {"a.weight": "cpu", "b.weight": "cpu"}


def test_notes_are_in_no_state_dict_and_change_nothing() -> None:
    model, x = net(), torch.randn(2, 4)
    before, names = model(x), list(model.state_dict())
    flow.nn.offload(flow.nn.offload(model, "*"), "*", "saved")
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), before)


def test_annotations_tell_it() -> None:
    model = flow.nn.offload(flow.nn.offload(net(), "0.weight", to="disk"), "1", "saved", ahead=2)
    text = str(flow.nn.annotations(model))
    assert "states on disk" in text
    assert "saved on cpu ahead 2" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: flow.nn.offload(m, "0.weigth"), "has no parameter or module called '0.weigth'\n.*'0.weight'"),
        (lambda m: flow.nn.offload(m, "7", "saved"), "has no module called '7'"),
        (lambda m: flow.nn.offload(m, "0.weight", "saved"), "'0.weight'\n  0.weight is a parameter: name the module"),
        (lambda m: flow.nn.offload(m, "*", "weights"), "weights rest on the device.*\n.*kind=\"weights\""),
        (lambda m: flow.nn.offload(m, "*", "grads"), "grads rest on the device.*\n.*kind=\"grads\""),
        (lambda m: flow.nn.offload(m, "*", "buffers"), "what='buffers'\n  known are 'states' and 'saved'"),  # type: ignore[arg-type]
        (lambda m: flow.nn.offload(m, "*", to="cuda"), "to='cuda'\n  write 'cpu' or 'disk'"),  # type: ignore[arg-type]
        (lambda m: flow.nn.offload(m, "*", ahead=1), "ahead=1 of states\n.*leave it out"),
        (lambda m: flow.nn.offload(m, "*", "saved", ahead=0), "ahead=0 of saved\n.*from 1"),
        (lambda m: flow.nn.offload(m, [m]), "expected names of modules or parameters, found Sequential"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    with pytest.raises(SbpError, match=f"^offload: (?s:.*){message}"):
        call(net())  # type: ignore[operator]
