"""Files with global tensors: the names in them, so that those of today are read tomorrow."""

import io
import pickle
import pickletools
from pathlib import Path

import pytest
import torch

import sbpflow as flow
from tests.ranks import Ranks


def test_a_file_names_what_makes_the_tensor_by_the_same_name_wherever_that_is_written() -> None:
    x = flow.ones(4, placement=flow.placement("cpu", [0, 1]), sbp="S(0)", requires_grad=True)
    said = [arg for _, arg, _ in pickletools.genops(pickle.dumps(x)) if isinstance(arg, str)]
    assert said[:2] == ["sbpflow.nn.tensors.copies", "assemble"]
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(file) == []


def read_back(folder: str) -> list[str]:
    """Of tensors that every process saves, and reads from the file of the first: the values, or why not."""
    p, me = flow.placement("cpu:[0-3] as (data=2, tensor=2)"), flow.boxing.owned(flow.placement("cpu:[0-3]"))[0]
    said = []
    for name, sbp in (("whole", flow.B), ("cut", (flow.B, flow.S(0))), ("sum", (flow.P, flow.B))):
        x = flow.tensor(torch.arange(4.0), placement=p, sbp=sbp)
        torch.save(x, f"{folder}/{name}-{me}.pt")
        torch.distributed.barrier()
        try:
            y = torch.load(f"{folder}/{name}-0.pt")
            said.append(str(y.to_local().tolist()))
        except Exception as error:
            said.append(str(error).splitlines()[1].partition(";")[0].strip())
    return said


def test_a_rank_takes_of_a_file_its_own_part_or_none(ranks4: Ranks, tmp_path: Path) -> None:
    whole, left, lost = "[0.0, 1.0, 2.0, 3.0]", "[0.0, 1.0]", "that was of ranks [0]"
    assert ranks4(read_back, str(tmp_path)) == [
        [whole, left, whole], [whole, lost, lost], [whole, left, lost], [whole, lost, lost],
    ]  # fmt: skip


def test_a_tensor_takes_all_of_another_memory_or_none() -> None:
    p = flow.placement("cpu:[0-1]")
    x = flow.tensor(torch.arange(8.0).view(2, 4), placement=p, sbp=flow.S(0))
    y = flow.zeros(2, 4, placement=p, sbp=flow.S(0))
    for where in ((4, (2, 4), (4, 1)), (0, (2, 4), (1, 2)), (0, (2, 2), (4, 1))):
        with pytest.raises(flow.SbpError, match="takes all of another's memory"):
            y.set_(x.untyped_storage(), *where)
    assert not y.full_tensor().any()
    assert y.set_(x.untyped_storage(), 0, [2, 4], [4, 1]).data_ptr() == x.data_ptr()
