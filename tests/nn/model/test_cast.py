"""Types that are said: which tensors and modules a pattern means, and that nothing else changes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn import cast
from sbpflow.nn.model.cast import in_half, types_of, works_of
from sbpflow.placement.errors import SbpError

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.emb.weight
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("table", torch.zeros(3))


def weights(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: types.weights for name, types in types_of({"": model}).items()}


def works(model: nn.Module) -> dict[str, torch.dtype]:
    found = works_of({"": model})
    return {path: found[id(module)].dtype for path, module in model.named_modules() if id(module) in found}


def test_a_star_is_the_model_with_all_real_weights_and_no_buffer() -> None:
    model = Net()
    assert cast(model, {"*": "bf16"}) is model
    real = {name for name, p in model.named_parameters(remove_duplicate=False) if p.dtype is FP32}
    assert weights(model) == dict.fromkeys(real, BF16)
    assert works(model) == {path: BF16 for path, _ in model.named_modules()}
    assert all(p.dtype is not BF16 for p in model.parameters())
    assert model.state_dict().keys() == Net().state_dict().keys()


def test_the_first_pattern_of_a_dict_and_the_last_call_count() -> None:
    model = Net()
    cast(model, {"blocks.1.0": FP32, "blocks.*": BF16})
    assert weights(model)["blocks.1.0.weight"] is FP32
    assert weights(model)["blocks.1.1.weight"] is BF16
    assert works(model)["blocks.1.0"] is FP32
    assert "" not in works(model)
    cast(model, {"*": FP16})
    assert set(weights(model).values()) == {FP16} == set(works(model).values())


def test_none_takes_it_back() -> None:
    model = Net()
    untouched = [vars(module).keys() for module in model.modules()]
    cast(model, {"*": "bf16"})
    cast(model, {"*": "fp32"}, kind="grads")
    cast(model, {"blocks.0": None})
    assert weights(model)["blocks.0.1.weight"] is FP32
    assert "blocks.0.1" not in works(model)
    cast(model, {"*": None})
    cast(model, {"*": None}, kind="grads")
    assert (types_of({"": model}), works_of({"": model})) == ({}, {})
    assert [vars(module).keys() for module in model.modules()] == untouched


def test_grads_and_states_are_as_weights_unless_said() -> None:
    model = Net()
    cast(model, {"blocks.*": "bf16"})
    cast(model, {"blocks.0": FP32, "head": FP64}, kind="states")
    cast(model, {"blocks.1": FP32}, kind="grads")
    types = types_of({"": model})
    assert types["blocks.0.1.weight"] == (BF16, BF16, FP32, FP32)
    assert types["blocks.1.1.weight"] == (BF16, FP32, BF16, FP32)
    assert types["head.weight"] == types["emb.weight"] == (FP32, FP32, FP64, FP32)  # tied
    assert "" not in works(model)


def test_what_surrounds_a_cast_module_is_of_the_type_that_most_of_the_model_was() -> None:
    model = Net()
    model.blocks.to(BF16)
    cast(model, {"head": FP16})
    before = [said.before for said in works_of({"": model}).values()]
    assert before == [BF16]
    cast(model, {"*": FP32})
    assert {said.before for said in works_of({"": model}).values()} == {BF16}


def test_a_buffer_is_meant_where_it_is_named_and_no_module_around_it() -> None:
    model = Net()
    cast(model, {"table": "bf16"})
    assert weights(model) == {"table": BF16}
    with pytest.raises(SbpError, match="no parameter or module with parameters of real numbers called 'table'"):
        cast(model, {"table": "bf16"}, kind="states")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_it(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = cast(Net(), {"*": "bf16"})
    cast(model, {"head": "fp32"}, kind="states")
    again: Any = copied(model)
    assert types_of({"": again}) == types_of({"": model})
    assert works(again) == works(model)


def test_weights_that_compute_in_fp16_are_known() -> None:
    model = Net()
    assert not in_half({"": cast(model, {"*": "bf16"})})
    assert in_half({"": cast(model, {"blocks.0.1.weight": "fp16"})})
    assert in_half({"": nn.Linear(2, 2).half()})
    assert not in_half({"": nn.Linear(2, 2).half().requires_grad_(False)})


def test_eager_code_runs_as_ever() -> None:
    model = Net()
    x = torch.randn(2, 4)
    before = model.blocks[0](x)
    cast(model, {"*": "bf16"})
    assert torch.equal(model.blocks[0](x), before)


@pytest.mark.parametrize(
    ("patterns", "kind", "said"),
    [
        ({"blocks.*.atn": BF16}, "weights", r"called 'blocks.\*.atn'"),
        ({"blocks.7": BF16}, "weights", "did you mean 'blocks."),
        ({"*": "bf61"}, "weights", "which is no type of real numbers"),
        ({"*": torch.int8}, "weights", "which is no type of real numbers"),
        ({"*": "fp8"}, "grads", "are to be fp8"),
        ({"*": torch.float8_e8m0fnu}, "weights", "only products have 8 bits"),
        ({"*": "bf16"}, "weight", "known are 'weights', 'grads', 'states'"),
        ({"count": "bf16"}, "weights", "called 'count'"),
    ],
)
def test_what_cannot_be_is_an_error_and_nothing_is_said(patterns: Any, kind: Any, said: str) -> None:
    model = Net()
    with pytest.raises(SbpError, match=said):
        cast(model, {"head": BF16, **patterns} if kind != "weight" else patterns, kind=kind)
    assert (types_of({"": model}), works_of({"": model})) == ({}, {})


def test_a_parameter_that_is_tied_later_is_said_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cast(model, {"0": "bf16"})
    model[1].weight = model[0].weight
    with pytest.raises(SbpError, match=r"one parameter is cast in two ways\n  as 0.weight: weights bf16\n"):
        types_of({"": model})


def test_a_global_parameter_keeps_its_type() -> None:
    model = nn.Linear(4, 4)
    flow.nn.to_global(model, flow.placement("cpu", range(2)), sbp=flow.B)
    cast(model, {"*": "fp32"})
    with pytest.raises(SbpError, match="weight is to be bf16, and is global already as fp32"):
        cast(model, {"*": "bf16"})
    assert types_of({"": model})["weight"].weights is FP32


def test_annotations_show_the_types() -> None:
    model = cast(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), {"0": "bf16"})
    cast(model, {"0.weight": "fp32"}, kind=("grads", "states"))
    rows = {line.label: line.cells for line in flow.nn.annotations(model).lines[2:4]}
    assert rows["weight"][1] == "float32 to bf16, grads fp32, states fp32"
    assert rows["bias"][1] == "float32 to bf16"
    assert "float32  " in str(flow.nn.annotations(model)).splitlines()[-3]
