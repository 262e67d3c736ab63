"""Files with global tensors: the names in them, so that those of today are read tomorrow."""

import io
import pickle
import pickletools

import torch

import sbpflow as flow


def test_a_file_names_what_makes_the_tensor_by_the_same_name_wherever_that_is_written() -> None:
    x = flow.ones(4, placement=flow.placement("cpu", [0, 1]), sbp="S(0)", requires_grad=True)
    said = [arg for _, arg, _ in pickletools.genops(pickle.dumps(x)) if isinstance(arg, str)]
    assert said[:2] == ["sbpflow.nn.tensors.copies", "assemble"]
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(file) == []
