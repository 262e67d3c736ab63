"""Models from safetensors files: the values that transformers' own from_pretrained gives, each rank its own part."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn import materialise, place, shard, to_global
from sbpflow.placement.errors import DtypeError, FileError, SbpError, ShapeError
from tests.nn.families import made
from tests.nn.files.counting import bytes_read
from tests.ranks import Ranks

GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
LINE = flow.placement("cpu:[0-3]")
THREE = flow.placement("cpu:[0-2]")
NAMES = ["llama", "gpt2", "bert", "mixtral"]
TOKENS = torch.arange(32).reshape(4, 8) + 3


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def family(name: str) -> Any:
    return made(name).float().eval()


Saved = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """The folder of a family, and what from_pretrained makes of it."""
    import transformers

    @cache
    def of(name: str) -> tuple[Path, Any]:
        model, folder = family(name), tmp_path_factory.mktemp(name)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.1)  # biases are zeros else
        model.save_pretrained(folder, max_shard_size="50KB" if name == "llama" else "1GB")
        assert (folder / "model.safetensors.index.json").exists() == (name == "llama")
        return folder, type(model).from_pretrained(folder, config=model.config, dtype=torch.float32).eval()

    transformers.utils.logging.disable_progress_bar()
    yield of
    transformers.utils.logging.enable_progress_bar()


def values(model: nn.Module) -> dict[str, Tensor]:
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: (v.full_tensor() if isinstance(v, flow.GlobalTensor) else v).detach() for name, v in held}


def same(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = values(model), values(other)
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def logits(model: Any, tokens: Any) -> Tensor:
    with torch.no_grad():
        found = model(tokens, **({"use_cache": False} if hasattr(model.config, "use_cache") else {})).logits
    plain: Tensor = found.full_tensor() if isinstance(found, flow.GlobalTensor) else found
    return plain


LAYOUTS: dict[str, tuple[flow.Placement, Callable[[Tensor], Any]]] = {
    "data parallel": (GRID, lambda w: B),
    "S(0), uneven": (THREE, lambda w: S(0) if w.ndim else B),
    "S(1)": (LINE, lambda w: S(1) if w.ndim > 1 else B),
    "2-D": (GRID, lambda w: (S(0), S(1)) if w.ndim > 1 else (B, B)),
    "nested": (GRID, lambda w: (S(0), S(0)) if w.ndim else (B, B)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_from_pretrained(saved: Saved, name: str, way: str) -> None:
    folder, plain = saved(name)
    where, lie = LAYOUTS[way]
    model = on_meta(lambda: family(name))
    with bytes_read() as seen:
        assert flow.load(folder, model) is model
        assert seen.total == 0
        to_global(model, where, lambda name, value: lie(value))
    assert same(model, plain)
    assert {w.sbp for w in model.parameters() if w.ndim == 2} == {flow.sbp.signature(lie(torch.ones(1, 1)), where)}
    assert seen.total == sum({w.data_ptr(): w.nbytes for w in plain.state_dict().values()}.values())
    if way == "data parallel":
        everywhere = flow.tensor(TOKENS, placement=where, sbp=B)
        assert torch.equal(logits(model, everywhere), logits(plain, TOKENS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_gives_the_logits_of_from_pretrained(saved: Saved, name: str) -> None:
    folder, plain = saved(name)
    model = flow.load(folder, on_meta(lambda: family(name)))
    more = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    step = flow.compile(model, lambda model, x: model(x, **more).logits, placement=GRID)
    with torch.no_grad():
        out = step(TOKENS)
    torch.testing.assert_close(out.full_tensor(), logits(plain, TOKENS))
    assert same(model, plain)


def test_a_base_model_and_one_with_a_tied_head_read_each_others_files(saved: Saved, tmp_path: Path) -> None:
    folder, plain = saved("gpt2")
    plain.transformer.save_pretrained(tmp_path)
    for start, make in ((folder, lambda: family("gpt2").transformer), (tmp_path, lambda: family("gpt2"))):
        model = to_global(flow.load(start, on_meta(make)), LINE, lambda name, w: S(0) if w.ndim else B)
        assert same(model, plain if hasattr(model, "lm_head") else plain.transformer)


class Net(nn.Module):
    """Tied weights, one without dims, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.scale, self.inner = nn.Parameter(torch.ones(())), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.arange(6.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.steps.copy_(torch.arange(6.0))  # type: ignore[operator]
        nn.init.zeros_(self.inner[0].weight)  # type: ignore[arg-type]


def written(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    more: dict[str, Tensor] = {},  # noqa: B006
) -> tuple[Path, Net]:
    """A file of a model, and the model."""
    torch.manual_seed(7)
    net = Net()
    net.scale.data.fill_(3.0)
    held = {name: value.to(dtype) if value.is_floating_point() else value for name, value in net.state_dict().items()}
    save_file({name: value for name, value in held.items() if name != "head.weight"} | more, folder / "m.safetensors")
    return folder / "m.safetensors", net


def test_initialisers_make_what_no_file_has_and_leave_alone_what_comes_from_one(tmp_path: Path) -> None:
    path, plain = written(tmp_path)
    model = place(flow.load(path, on_meta(Net)), GRID)
    torch.manual_seed(1)
    drawn = torch.rand(2)
    torch.manual_seed(1)
    materialise(model, {"emb.weight": (S(0), S(1)), "inner.0.weight": (S(1), B)})
    assert same(model, plain)
    assert torch.equal(torch.rand(2), drawn)


def test_tied_weights_stay_tied_and_are_read_once(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    with bytes_read() as seen:
        model = place(flow.load(path, on_meta(Net)), GRID)
        materialise(model, {"head.weight": (S(0), S(0))})
    assert model.head.weight is model.emb.weight
    assert [name for name, _ in seen.regions if "emb" in name or "head" in name] == ["emb.weight"] * 4


def test_a_file_with_both_names_of_a_tied_weight_must_have_the_same_values(tmp_path: Path) -> None:
    weight = load_file(written(tmp_path)[0])["emb.weight"]
    path, plain = written(tmp_path, more={"head.weight": weight.clone()})
    model = place(flow.load(path, on_meta(Net)), LINE)
    materialise(model)
    assert same(model, plain)
    path, _ = written(tmp_path, more={"head.weight": weight + 1})
    model = place(flow.load(path, on_meta(Net)), LINE)
    with pytest.raises(FileError, match=r"emb.weight and head.weight are tied in the model, and the files have diff"):
        materialise(model)
    assert all(w.is_meta for w in model.parameters())
    with pytest.raises(FileError, match="are tied in the model"):
        flow.load(path, Net())


def test_notes_stay_in_copies_and_pickles_and_go_when_the_values_are_there(tmp_path: Path) -> None:
    path, plain = written(tmp_path)
    model = on_meta(Net)
    before = list(model.state_dict())
    flow.load(path, model)
    assert list(model.state_dict()) == before
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        materialise(place(each, LINE))
        assert same(each, plain)
        assert not [key for module in each.modules() for key in vars(module) if key == "_sbpflow_files"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_floats_are_converted_on_the_way(tmp_path: Path, dtype: torch.dtype) -> None:
    path, plain = written(tmp_path, dtype)
    for name, value in plain.state_dict().items():
        if value.is_floating_point():
            value.copy_(load_file(path)[name if name != "head.weight" else "emb.weight"])
    model = place(flow.load(path, on_meta(lambda: Net().half())), LINE)
    materialise(model, {"emb.weight": S(0)})
    assert same(model, plain.half())


def test_a_number_too_large_for_the_model_is_an_error_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    path, plain = written(tmp_path)
    save_file(load_file(path) | {"scale": torch.tensor(1e6)}, path)
    model = place(flow.load(path, on_meta(lambda: Net().half())), LINE)
    with pytest.raises(DtypeError, match=r"^flow.load: scale has numbers that torch.float16 does not hold"):
        materialise(model)
    assert all(w.is_meta for w in model.parameters())
    save_file(load_file(path) | {"scale": plain.scale.detach()}, path)
    materialise(model)
    assert same(model, plain.half())


def test_a_model_that_has_memory_is_read_into_at_once(tmp_path: Path) -> None:
    path, plain = written(tmp_path)
    model = Net()
    weight = model.emb.weight
    flow.load(path, model)
    assert model.emb.weight is weight
    assert same(model, plain)


@pytest.mark.parametrize("sbp", [B, (S(0), S(1)), (S(0), S(0)), (flow.P, S(0))], ids=str)
def test_a_model_that_is_global_is_read_into_its_shards(tmp_path: Path, sbp: Any) -> None:
    path, plain = written(tmp_path)
    model = to_global(Net(), GRID, {"*.weight": B, "*": B} | {"emb.weight": sbp, "head.weight": sbp})
    weight = model.emb.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flow.load(path, model)
    assert model.emb.weight is weight is model.head.weight
    assert weight.requires_grad
    assert weight.is_leaf
    assert same(model, plain)
    assert any(held is weight for held in optimizer.param_groups[0]["params"])


def test_a_part_of_a_model_is_read_and_the_rest_drawn(tmp_path: Path) -> None:
    whole: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    save_file(whole[0].state_dict(), tmp_path / "m.safetensors")
    model = place(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), LINE)
    flow.load(tmp_path / "m.safetensors", model[0])
    torch.manual_seed(2)
    materialise(model)
    torch.manual_seed(2)
    whole[1] = nn.Linear(3, 3)
    assert same(model, whole)
    flow.load(tmp_path / "m.safetensors", model[1])
    assert torch.equal(model[1].weight.full_tensor(), whole[0].weight)


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("inner.0", "iner.0"): value for name, value in tensors.items()}


def integers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"emb.weight": tensors["emb.weight"].to(torch.int8)}


MISTAKES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], type[Exception], str]] = {
    "other names": (
        renamed,
        FileError,
        "flow.load: {} does not hold the weights of this Net\n"
        "  missing in the files: inner.0.bias and 1 more; iner.0.bias is near\n"
        "  not in the model: iner.0.bias and 1 more; inner.0.bias is near\n  make the model that was saved",
    ),
    "a missing name": (
        lambda held: {name: value for name, value in held.items() if name != "scale"},
        FileError,
        "flow.load: {} does not hold the weights of this Net\n  missing in the files: scale\n",
    ),
    "an unexpected name": (
        lambda held: held | {"more": torch.ones(1)},
        FileError,
        "flow.load: {} does not hold the weights of this Net\n  not in the model: more\n",
    ),
    "a buffer that is in no state_dict": (
        lambda held: held | {"steps": torch.ones(6)},
        FileError,
        "flow.load: {} does not hold the weights of this Net\n  not in the model: steps\n",
    ),
    "another shape": (
        lambda held: held | {"emb.weight": torch.ones(12, 7)},
        ShapeError,
        "flow.load: emb.weight is (12, 6) in the model, and (12, 7) in the files\n  there it is emb.weight in {}\n",
    ),
    "another kind of numbers": (
        integers,
        DtypeError,
        "flow.load: emb.weight is torch.float32, and emb.weight in {} is torch.int8",
    ),
}
STARTS: dict[str, Callable[[], nn.Module]] = {
    "meta": lambda: on_meta(Net),
    "plain": Net,
    "global": lambda: to_global(Net(), LINE),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_file_of_another_model_is_told_and_nothing_changes(tmp_path: Path, name: str, start: str) -> None:
    path, _ = written(tmp_path)
    change, kind, said = MISTAKES[name]
    save_file(change(load_file(path)), path)
    model = STARTS[start]()
    before = {key: v.is_meta or v.detach().clone() for key, v in model.state_dict().items()}
    with pytest.raises(kind) as caught, bytes_read() as seen:
        flow.load(path, model)
    assert str(caught.value).startswith(said.replace("{}", str(path)))
    assert seen.total == 0
    assert not any("_sbpflow_files" in vars(module) for module in model.modules())
    assert all(old is True or torch.equal(old, model.state_dict()[key]) for key, old in before.items())


def test_what_happened_to_a_model_between_is_told(tmp_path: Path) -> None:
    path, plain = written(tmp_path)
    model = place(flow.load(path, on_meta(Net)), LINE)
    model.to_empty(device="cpu")
    with pytest.raises(SbpError, match=r"^scale is to be read from .*m.safetensors, and has got other memory"):
        materialise(model)
    model.steps.copy_(plain.steps)
    model.head.weight = model.emb.weight  # which to_empty made two
    flow.load(path, model)
    materialise(model)
    assert same(model, plain)
    model = place(flow.load(path, on_meta(Net)), LINE)
    model.scale = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ShapeError, match=r"^flow.load: scale is \(2,\) in the model, and \(\) in the files"):
        materialise(model)


def test_a_buffer_that_nothing_computes_is_told(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "m.safetensors")
    model = nn.PReLU(2)
    model.register_buffer("table", torch.ones(3, device="meta"), persistent=False)
    model.__class__ = type("Odd", (nn.PReLU,), {"reset_parameters": lambda self: None})
    flow.load(tmp_path / "m.safetensors", place(model, LINE))
    with pytest.raises(SbpError, match=r"^materialise: table has no value on meta"):
        materialise(model)


def test_what_is_no_module_or_a_lazy_one_is_told(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    with pytest.raises(SbpError, match=r"^flow.load: weight has no shape yet"):
        flow.load(path, nn.LazyLinear(3))
    with pytest.raises(SbpError, match=r"^flow.load: expected a module to give values to, found _Compiled"):
        flow.load(path, flow.compile(nn.Linear(2, 2), placement=LINE))  # type: ignore[type-var]


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    path, plain = written(tmp_path)
    model, other = Net(), place(on_meta(Net), LINE)
    with torch.device("meta"):
        flow.load(path, model)
        flow.load(path, other)
        materialise(other)
    assert same(model, plain)
    assert same(other, plain)


def test_a_graph_that_ran_goes_on_with_what_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, new, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(8, 4)
    save_file(new.state_dict(), tmp_path / "m.safetensors")
    step = flow.compile(
        model, lambda model, x: model(x).square().sum(), torch.optim.AdamW(model.parameters()), placement=GRID
    )
    step(x)
    flow.load(tmp_path / "m.safetensors", model)
    torch.testing.assert_close(step(x).full_tensor(), new(x).square().sum().detach())


# On real ranks


def parts(folder: str) -> tuple[int, int, list[tuple[str, Tensor]]]:
    """Bytes that this rank read, bytes that it keeps, and its pieces."""
    model = flow.load(folder, on_meta(lambda: family("llama")))
    place(model, LINE)
    shard(model, {"*norm.weight": B, "*down_proj*": S(1), "*": S(0)})
    with bytes_read() as seen:
        materialise(model)
    held: list[tuple[str, Any]] = [*model.named_parameters()]
    return seen.total, sum(w.to_local().nbytes for _, w in held), [(name, w.to_local().detach()) for name, w in held]


def test_every_rank_reads_what_it_keeps_and_no_more(saved: Saved, ranks4: Ranks) -> None:
    folder, plain = saved("llama")
    runs = ranks4(parts, str(folder))
    for read, kept, _ in runs:
        assert read == kept
    weights = dict(plain.named_parameters())
    for pieces in zip(*(run[2] for run in runs), strict=True):
        name, first = pieces[0]
        whole = weights[name]
        dim = 1 if "down_proj" in name else 0
        joined = first if "norm" in name else torch.cat([piece for _, piece in pieces], dim)
        assert torch.equal(joined, whole), name


def forgetful(path: str) -> str:
    """Rank 2 does not call flow.load."""
    model = place(on_meta(Net), LINE)
    if flow.boxing.owned(LINE) != (2,):
        flow.load(path, model)
    torch.manual_seed(0)
    with pytest.raises(FileError) as caught:
        materialise(model)
    return str(caught.value)


def test_ranks_that_have_noted_other_files_are_refused(tmp_path: Path, ranks4: Ranks) -> None:
    path, _ = written(tmp_path)
    said = ranks4(forgetful, str(path))
    assert all(each.startswith("flow.load: ranks 0 and 2 are to read different values from files") for each in said)
    assert ["noted here: no values" in each for each in said] == [False, False, True, False]


def torn(folder: str) -> tuple[str, bool]:
    """Each rank has a copy of the file, and that of rank 1 is torn between the note and the reading."""
    (rank,) = flow.boxing.owned(LINE)
    path = Path(folder) / f"{rank}.safetensors"
    path.write_bytes((Path(folder) / "m.safetensors").read_bytes())
    model = place(flow.load(path, on_meta(Net)), LINE)
    if rank == 1:
        path.write_bytes(path.read_bytes()[:-40])
    torch.manual_seed(0)
    with pytest.raises(FileError) as caught:
        materialise(model)
    return str(caught.value), all(weight.is_meta for weight in model.parameters())


def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path, ranks4: Ranks) -> None:
    written(tmp_path)
    for rank, (said, unchanged) in enumerate(ranks4(torn, str(tmp_path))):
        own = f"flow.load: {tmp_path}/1.safetensors cannot be read: "
        assert said.startswith(own if rank == 1 else "flow.load: rank 1 could not read its part of the weights\n")
        assert unchanged


def tower() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def stages(path: str) -> tuple[int, list[tuple[str, Tensor]]]:
    """A pipeline of two stages: bytes that this rank read, and the pieces that it has."""
    model: Any = flow.load(path, on_meta(tower))
    for layers, ranks in ((model[:2], "cpu:[0-1]"), (model[2:], "cpu:[2-3]")):
        place(layers, flow.placement(ranks))
    shard(model, {"*.weight": S(1), "*.bias": B})
    with bytes_read() as seen:
        materialise(model)
    held = [(name, w) for name, w in model.named_parameters() if flow.boxing.owned(w.placement)]
    return seen.total, [(name, w.to_local().detach()) for name, w in held]


def test_a_stage_of_a_pipeline_reads_its_own_layers(tmp_path: Path, ranks4: Ranks) -> None:
    plain = tower()
    save_file(plain.state_dict(), tmp_path / "m.safetensors")
    weights = dict(plain.named_parameters())
    for rank, (read, pieces) in enumerate(ranks4(stages, str(tmp_path / "m.safetensors"))):
        assert [name for name, _ in pieces] == [*weights][rank // 2 * 4 :][:4]
        assert read == sum(piece.nbytes for _, piece in pieces) == 2 * (8 * 8 // 2 + 8) * 4
        for name, piece in pieces:
            wanted = weights[name].chunk(2, 1)[rank % 2] if "weight" in name else weights[name]
            assert torch.equal(piece, wanted)


def read_into_shards(path: str) -> tuple[int, int, list[Tensor]]:
    """A model that is global on two ranks, as two others are not."""
    torch.manual_seed(0)
    pair = flow.placement("cpu:[1-2]")
    model: Any = to_global(Net(), pair, {"emb.weight": S(0), "head.weight": S(0)})
    with bytes_read() as seen:
        flow.load(path, model)
    mine = flow.boxing.owned(pair)
    held = list({id(v): v for v in (*model.parameters(), *model.buffers())}.values())
    kept = sum(v.to_local().nbytes for v in held if v is not model.steps) if mine else 0
    return seen.total, kept, [model.emb.weight.to_local().detach()] if mine else []


def test_ranks_that_hold_shards_read_them_and_others_nothing(tmp_path: Path, ranks4: Ranks) -> None:
    path, plain = written(tmp_path)
    runs = ranks4(read_into_shards, str(path))
    assert [read == kept for read, kept, _ in runs] == [True] * 4
    assert [bool(read) for read, _, _ in runs] == [False, True, True, False]
    assert torch.equal(torch.cat([*runs[1][2], *runs[2][2]]), plain.emb.weight)
