"""Names of files and models: transformers' own renamings and conversions, recorded so that parts can be read."""

from typing import Any

import pytest
import torch
from torch import nn

from sbpflow.nn.files.names import spared_names, values_by_name
from sbpflow.nn.files.values import Concatenated, FileTensor
from sbpflow.placement.errors import FileError
from tests.nn.families import made


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return made(name)


def files_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, FileTensor]:
    return {name: FileTensor("f", name, shape, torch.float32) for name, shape in shapes.items()}


def test_a_model_of_nobodys_has_the_names_of_its_files() -> None:
    files = files_of({"weight": (2, 2), "other": (3,)})
    assert values_by_name(nn.Linear(2, 2), files, ["weight", "bias"]) == files


@pytest.mark.parametrize(("add", "remove"), [("", "model."), ("model.", "")], ids=["of a base", "of a head"])
def test_a_base_model_and_one_with_a_head_read_each_others_files(add: str, remove: str) -> None:
    model = on_meta("llama") if remove else on_meta("llama").model
    names = list(model.state_dict())
    files = files_of({add + name.removeprefix(remove): (1,) for name in names})
    assert set(values_by_name(model, files, names)) == set(names)


def test_experts_one_by_one_are_those_of_a_layer_together() -> None:
    model = on_meta("mixtral")
    names = dict(model.state_dict())
    layer, (experts, both, hidden) = (
        "model.layers.0.mlp.experts",
        names["model.layers.0.mlp.experts.gate_up_proj"].shape,
    )
    old = "model.layers.0.block_sparse_moe.experts"
    files = files_of({f"{old}.{e}.{w}.weight": (both // 2, hidden) for e in range(experts) for w in ("w1", "w3")})
    found = values_by_name(model, files, names)
    value = found[f"{layer}.gate_up_proj"]
    assert isinstance(value, Concatenated)
    assert value.shape == (experts, both, hidden)
    order = [each.name.removeprefix(old) for each in value.tensors()]
    assert order == [f".{e}.{w}.weight" for w in ("w1", "w3") for e in range(experts)]


def test_a_conversion_that_no_part_can_be_read_of_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    odd = WeightConverter("old.weight", "lm_head.weight", [Interleave(0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [odd])
    model = on_meta("llama")
    with pytest.raises(FileError) as caught:
        values_by_name(model, files_of({"old.weight": (64, 32)}), list(model.state_dict()))
    assert str(caught.value).startswith("flow.load: old.weight of the files is not as LlamaForCausalLM has it")
    assert "makes lm_head.weight by Interleave: " in str(caught.value)


def test_two_tensors_for_one_name_are_an_error() -> None:
    model = on_meta("llama")
    with pytest.raises(FileError, match=r"model.norm.weight and norm.weight of the files are both model.norm.weight"):
        values_by_name(model, files_of({"norm.weight": (4,), "model.norm.weight": (4,)}), list(model.state_dict()))


def test_buffers_that_older_versions_saved_are_spared() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert spared_names(on_meta("llama"), "unexpected", [name, "model.position_ids", "new.weight"]) == {name}
    assert spared_names(nn.Linear(2, 2), "unexpected", [name]) == set()
