"""One safetensors file from global tensors: what plain safetensors and transformers read is what was there, bitwise."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S, SbpError
from sbpflow.nn.files.joint_file import save_file
from tests.nn.families import made
from tests.ranks import Ranks

GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
THREE = flow.placement("cpu:[0-2]")
TEN = ["llama", "gpt2", "bert", "mixtral", "t5", "opt", "gemma2", "qwen3_moe", "vit", "falcon"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def family(name: str) -> Any:
    model = made(name).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.1)  # biases are zeros else
    return model


def batch_of(name: str, model: nn.Module) -> dict[str, Tensor]:
    from tests.nn.families import FAMILIES

    torch.manual_seed(1)
    found = {key: x for key, x in FAMILIES[name].batch().items() if key != "labels"}
    return {key: x.float() if x.is_floating_point() else x for key, x in found.items()} | (
        {"decoder_input_ids": torch.arange(32).reshape(8, 4) + 3} if name == "t5" else {}
    )


def all_of(folder: Path) -> dict[str, Tensor]:
    return {key: x for file in folder.glob("*.safetensors") for key, x in safetensors.torch.load_file(file).items()}


def cut(model: nn.Module) -> Any:
    """Every matrix in tiles, every vector along the second axis: layouts that nobody chose."""
    ways = {name: (S(0), S(1)) if x.ndim > 1 else (B, S(0)) for name, x in model.named_parameters()}
    return flow.nn.to_global(model, GRID, ways)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TEN)
def test_a_folder_of_ours_gives_transformers_the_same_logits_and_the_other_way_too(name: str, tmp_path: Path) -> None:
    plain, ours = family(name), cut(family(name).train(False))
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            theirs.copy_(mine.full_tensor())
        batch = batch_of(name, plain)
        want = plain(**batch).logits
        ours.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
        again = type(plain).from_pretrained(tmp_path / "ours", config=plain.config, dtype=torch.float32).eval()
        assert torch.equal(again(**batch).logits, want)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    mine, theirs = (all_of(tmp_path / which) for which in ("ours", "theirs"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert len([*(tmp_path / "ours").glob("*.safetensors")]) > 2
    with torch.device("meta"):
        later = made(name).float().eval()
    flow.load(tmp_path / "theirs", later)
    cut(later)
    pairs: Any = zip(later.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine.full_tensor(), theirs) for mine, theirs in pairs)


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]


def test_any_dtype_layout_and_size_is_what_safetensors_reads(tmp_path: Path) -> None:
    values = {f"{dtype}": (torch.randn(5, 6) * 4).to(dtype) for dtype in DTYPES} | {
        "number": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "columns": torch.randn(6, 5).t(),
        "odd": torch.ones(3, dtype=torch.uint8),
    }
    held: dict[str, Tensor] = {
        name: flow.tensor(x, placement=THREE, sbp=S(at % x.ndim) if x.ndim else B)
        for at, (name, x) in enumerate(values.items())
    }
    held |= {"plain": torch.arange(4), "sum": flow.tensor(torch.arange(3.0), placement=THREE, sbp=P)}
    values |= {"plain": torch.arange(4), "sum": torch.arange(3.0)}
    safetensors.torch.save_file(held, tmp_path / "a.safetensors", {"format": "pt"})
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.keys() == values.keys()
    for name, want in values.items():
        assert found[name].dtype is want.dtype
        assert torch.equal(found[name].to(torch.complex64), want.to(torch.complex64)), name
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [f.name for f in tmp_path.iterdir()] == ["a.safetensors"]


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    model = cut(family("gpt2"))
    model.save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    safetensors.torch.save_model(model, f"{tmp_path}/b.safetensors")
    plain = family("gpt2")
    safetensors.torch.save_model(plain, f"{tmp_path}/c.safetensors")
    found, theirs = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in "bc")
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], x.full_tensor()) for name, x in model.state_dict().items() if name in found)
    again: Any = cut(family("gpt2"))
    missing, unexpected = safetensors.torch.load_model(again, tmp_path / "b.safetensors")
    assert not missing
    assert not unexpected
    pairs: Any = zip(again.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(mine.full_tensor(), theirs.full_tensor()) for mine, theirs in pairs)


def test_what_cannot_be_written_is_an_error_and_the_file_of_before_stays(tmp_path: Path) -> None:
    file, good = tmp_path / "a.safetensors", flow.ones(3, placement=THREE, sbp=S(0))
    save_file({"x": good}, file)
    before = file.read_bytes()
    for bad, said in (
        (torch.ones(3, device="meta"), "no dense tensor"),
        (torch.ones(3).to_sparse(), "no dense tensor"),
    ):
        with pytest.raises(SbpError, match=said):
            save_file({"x": good, "bad": bad}, file)
    with pytest.raises(FileNotFoundError):
        save_file({"x": good}, tmp_path / "nowhere" / "a.safetensors")
    assert file.read_bytes() == before


def written(folder: str) -> None:
    torch.manual_seed(0)
    cut(family("llama")).save_pretrained(folder)


def test_four_processes_write_one_file_without_a_whole_tensor(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4(written, str(tmp_path / "four"))
    torch.manual_seed(0)
    cut(family("llama")).save_pretrained(tmp_path / "one")
    one, four = (tmp_path / which / "model.safetensors" for which in ("one", "four"))
    assert one.read_bytes() == four.read_bytes()
    assert json.loads((tmp_path / "four" / "config.json").read_text())["model_type"] == "llama"


def of_two(path: str) -> None:
    flow.ones(4, placement=flow.placement("cpu:[0-3]"), sbp=S(0)).full_tensor()  # for a first move all come
    there = flow.placement("cpu:[1-2]")
    save_file({"w": flow.tensor(torch.arange(6.0), placement=there, sbp=S(0))}, path)


def test_processes_that_hold_nothing_have_nothing_to_do(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4(of_two, str(tmp_path / "of two"))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "of two")["w"], torch.arange(6.0))


def test_what_a_global_model_cannot_be_asked_for_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SbpError, match="upload_folder"):
        cut(family("gpt2")).save_pretrained(tmp_path, push_to_hub=True)


def failing(folder: str) -> str:
    x = flow.ones(8, placement=flow.placement("cpu:[0-3]"), sbp=S(0))
    try:
        save_file({"x": x}, folder if flow.boxing.owned(x.placement) == (2,) else folder + "/a.safetensors")
    except Exception as error:
        return str(error)
    return ""


def test_an_error_of_one_process_is_one_of_all(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4(failing, str(tmp_path))
    assert all(said)
    assert "rank 2 could not write" in said[0]


def other_names(folder: str) -> str:
    x = flow.ones(8, placement=flow.placement("cpu:[0-3]"), sbp=S(0))
    try:
        save_file({"y" if flow.boxing.owned(x.placement) == (3,) else "x": x}, folder + "/a.safetensors")
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_would_write_different_files_are_refused(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4(other_names, str(tmp_path))
    assert all("ranks 0 and 3 are to write other tensors" in each for each in said)
    assert not (tmp_path / "a.safetensors").exists()
