"""Models from the meta device: their values are those of one device, cut at once, and never all here."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn import materialise, place, shard
from sbpflow.nn.model.slots import slots
from sbpflow.nn.model.values.materialise import make_global
from sbpflow.placement.errors import SbpError, ShapeError
from tests.ranks import Ranks

GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
LINE = flow.placement("cpu:[0-3]")


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def values(model: nn.Module) -> dict[str, Tensor]:
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: (v.full_tensor() if isinstance(v, flow.GlobalTensor) else v).detach() for name, v in held}


def same(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = values(model), values(other)
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def layers() -> nn.Module:
    """Layers of torch, of which some initialise what others hold."""
    return nn.Sequential(
        nn.Embedding(33, 16, padding_idx=0),
        nn.TransformerEncoderLayer(16, 4, 32),
        nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 33)),
        nn.LSTM(33, 8, bidirectional=True),
        nn.Conv2d(3, 5, 3),
        nn.PReLU(),
    )


SIGNATURES: dict[str, Any] = {"B": B, "S0": {"tensor": S(0)}, "S0S0": (S(0), S(0)), "S0P": (S(0), P)}


@pytest.mark.parametrize("name", SIGNATURES)
def test_layers_get_the_values_that_their_constructors_would_give(name: str) -> None:
    torch.manual_seed(3)
    plain = layers()
    after = torch.rand(1)
    model = place(on_meta(layers), GRID)
    shard(model, {"5.weight": B, "*": SIGNATURES[name]})
    torch.manual_seed(3)
    materialise(model)
    assert same(model, plain)
    assert torch.equal(torch.rand(1), after)
    wanted = flow.sbp.signature(SIGNATURES[name], GRID)
    weights = dict(model.named_parameters())
    assert {w.sbp for n, w in weights.items() if n != "5.weight"} == {wanted}
    assert [type(w) for w in weights.values()] == [flow.GlobalTensor] * len(weights)
    assert all(isinstance(w, nn.Parameter) and w.requires_grad and w.is_leaf for w in weights.values())


class Net(nn.Module):
    """Initialised in nanoGPT's way: by a function for any module, that parts of it go around."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(12, 6), nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
        self.head = nn.Linear(6, 12, bias=False)
        next(self.inner[1].parameters()).requires_grad_(False)
        if tied:
            self.head.weight = self.emb.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if module is self.inner:  # what other modules hold, and have filled already
            first, _, second = self.inner.parameters()
            nn.init.trunc_normal_(first, std=0.5)
            second.data[2:4].mul_(3).add_(1)


def test_init_weights_comes_before_reset_parameters_which_fills_the_rest() -> None:
    """The calls on one device that give the same: each module's, children first."""
    plain = Net(tied=False)
    torch.manual_seed(5)
    with torch.no_grad():
        for module in (plain.emb, plain.norm):
            module.reset_parameters()
        for module in (*plain.inner, plain.inner, plain.head):
            plain._init_weights(module)
            if module is plain.inner[0]:
                kept = module.weight.clone()
                module.reset_parameters()  # its bias
                module.weight.copy_(kept)
    model = place(on_meta(lambda: Net(tied=False)), GRID)
    shard(model, {"inner.*.weight": (S(1), S(0)), "emb": "(B, S(1))"})
    torch.manual_seed(5)
    materialise(model)
    assert same(model, plain)


def test_tied_weights_stay_tied_and_frozen_ones_frozen() -> None:
    model = place(on_meta(Net), LINE)
    materialise(model, {"head.weight": S(0)})
    assert model.head.weight is model.emb.weight
    assert model.emb.weight.sbp == (S(0),)
    assert [name for name, w in model.named_parameters() if not w.requires_grad] == ["inner.1.weight"]
    assert model.emb.weight.std() > 0.5  # an embedding's values, as where the head is tied after both were made


def test_layouts_come_as_such_or_as_signatures_where_the_model_is_placed() -> None:
    elsewhere = flow.layout(flow.placement("cpu:[4-6]"), S(1), (3, 5))
    model = place(on_meta(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))), GRID)
    shard(model, {"1": (B, S(0)), "0.weight": B})
    materialise(model, {"0.weight": elsewhere, "1.bias": "(S(0), B)"})
    found = {name: (w.sbp, w.placement) for name, w in model.named_parameters()}
    assert found == {
        "0.weight": ((S(1),), elsewhere.placement),
        "0.bias": ((B, B), GRID),
        "1.weight": ((B, S(0)), GRID),
        "1.bias": ((S(0), B), GRID),
    }


def test_what_has_values_keeps_them_and_needs_no_initialiser() -> None:
    model = on_meta(layers)
    model[0] = nn.Embedding(33, 16)
    model.register_buffer("table", torch.arange(7))
    before, table = model[0].weight.detach().clone(), model.table
    place(model, LINE)
    materialise(model, {"table": S(0)})
    assert torch.equal(model[0].weight.full_tensor(), before)
    assert model.table.sbp == (S(0),)
    assert torch.equal(model.table.full_tensor(), table)
    assert model.table.to_local()[0].data_ptr() != table.data_ptr()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.lin = nn.Parameter(torch.empty(6)), nn.Linear(6, 6)
        self.register_buffer("steps", torch.arange(6), persistent=False)


class Filling(nn.Module):
    """Fills what its child does not."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = Bare()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.bare.scale)
        self.bare.register_buffer("steps", torch.arange(6), persistent=False)


def test_a_module_around_it_may_fill_what_a_module_leaves_empty() -> None:
    model = place(on_meta(Filling), LINE)
    torch.manual_seed(1)
    materialise(model, {"bare.scale": S(0)})
    torch.manual_seed(1)
    nn.Linear(6, 6)
    assert torch.equal(model.bare.scale.full_tensor(), torch.rand(6))
    assert torch.equal(model.bare.steps.full_tensor(), torch.arange(6))
    assert not isinstance(model.bare.steps, nn.Parameter)


def test_a_function_fills_what_no_module_does() -> None:
    model, asked = place(on_meta(Bare), LINE), []

    def fill(name: str, whole: Tensor) -> None:
        asked.append(name)
        whole.copy_(torch.arange(6))

    materialise(model, {"scale": S(0)}, init=fill)
    assert asked == ["scale", "steps"]
    assert torch.equal(model.scale.full_tensor(), torch.arange(6.0))
    assert model.steps.dtype is torch.int64


def partly(name: str, whole: Tensor) -> None:
    whole[1:] = 0


def left_empty(self: nn.Module) -> None:
    """An initialiser that forgets its bias."""
    nn.init.zeros_(self.weight)  # type: ignore[arg-type]


class Forgets(nn.Linear):
    reset_parameters = left_empty


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "a parameter that nothing fills": (
        lambda: materialise(place(on_meta(Bare), LINE)),
        "materialise: scale has no value on meta\n"
        "  Bare, which holds the parameter scale, does not fill it by reset_parameters, nor does an _init_weights "
        "around it\n  add one, or pass a function that fills it: materialise(..., init=lambda name, tensor: ...)",
    ),
    "a buffer that nothing fills": (
        lambda: materialise(place(on_meta(lambda: buffered(nn.Sequential())), LINE)),
        "materialise: steps has no value on meta\n"
        "  Sequential, which holds the buffer steps, does not fill it by reset_parameters, nor does an _init_weights "
        "around it\n  add one, or pass a function that fills it: materialise(..., init=lambda name, tensor: ...),\n"
        "  or build it on the CPU, as by torch.arange(n, device='cpu')",
    ),
    "an initialiser that forgets": (
        lambda: materialise(place(on_meta(lambda: Forgets(2, 2)), LINE)),
        "materialise: bias has no value on meta\n  Forgets, which holds",
    ),
    "a function that forgets": (
        lambda: materialise(place(on_meta(Bare), LINE), init=partly),
        "materialise: init=partly left scale without values\n  fill the whole",
    ),
    "no placement": (
        lambda: materialise(on_meta(layers)),
        "materialise: 0.weight, 1.self_attn.in_proj_weight, 1.self_attn.in_proj_bias, 1.self_attn.out_proj.weight and "
        "27 more have no placement\n  say where the model lives",
    ),
    "a name that is not there": (
        lambda: materialise(place(on_meta(Net), LINE), {"heed.weight": B}),
        "materialise: no parameter or buffer is called 'heed.weight'\n  there are 7\n  did you mean 'head.weight'?",
    ),
    "a layout of another tensor": (
        lambda: materialise(on_meta(lambda: nn.PReLU(3)), {"weight": flow.layout(LINE, B, (4,))}),
        "materialise: the layout of weight is of another tensor\n  it is torch.float32 (3,)\n  float32 (4,) as (B,)",
    ),
    "a lazy module": (
        lambda: materialise(place(nn.LazyLinear(3), LINE)),
        "materialise: weight has no shape yet\n  run the lazy module",
    ),
}


def buffered(module: nn.Module) -> nn.Module:
    module.register_buffer("steps", torch.arange(6), persistent=False)
    return module


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_is_told(name: str) -> None:
    mistake, said = ERRORS[name]
    with pytest.raises(SbpError) as caught:
        mistake()
    assert str(caught.value).startswith(said)


def test_a_signature_that_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"^materialise: emb.weight \(12, 6\) as S\(2\)\n  S\(2\) is out of range"):
        materialise(place(on_meta(Net), LINE), {"emb.weight": S(2)})


def test_after_an_error_the_model_is_as_it_was() -> None:
    model = place(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Forgets(2, 2))), LINE)
    before = [id(w) for w in model.parameters()]
    with pytest.raises(SbpError, match=r"^materialise: 1.bias has no value"):
        materialise(model)
    assert [id(w) for w in model.parameters()] == before
    assert all(w.is_meta for w in model.parameters())


def test_after_an_error_in_one_of_several_modules_all_are_as_they_were() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.device.type != "meta":
                raise RuntimeError("broken")

    with torch.device("meta"):
        modules = {"right": nn.Linear(2, 2), "wrong": Broken(2, 2)}
    before = [slot.value for slot in slots(modules)]
    lies = {id(x): flow.layout(LINE, B, tuple(x.shape)) for x in before}
    with pytest.raises(RuntimeError, match="broken"):
        make_global(modules, lies, torch.device("cpu"), "a test", "")
    assert all(slot.value is x for slot, x in zip(slots(modules), before, strict=True))


def test_an_optimizer_made_on_meta_is_refused() -> None:
    model = place(on_meta(lambda: nn.Linear(2, 2)), LINE)
    optimizer = torch.optim.SGD(model.parameters())
    materialise(model)
    model(flow.ones(3, 2, placement=LINE, sbp=B)).sum().backward()
    with pytest.raises(SbpError, match="the optimizer was made before"):
        optimizer.step()


def test_a_model_may_be_materialised_where_the_default_device_is_meta() -> None:
    model = place(on_meta(layers), LINE)
    torch.manual_seed(3)
    with torch.device("meta"):
        materialise(model)
    torch.manual_seed(3)
    assert same(model, layers())


class Peak(TorchDispatchMode):
    """The most bytes of plain tensors that live at one time, of those made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata for each in torch.utils._pytree.tree_leaves(args) if type(each) is Tensor
        }
        out = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(out):
            if type(one) in (Tensor, nn.Parameter) and not one.is_meta and one.numel():
                memory = one.untyped_storage()
                if memory._cdata in given and memory._cdata not in self.live:
                    continue  # a view of what was there before, as of the memory by which ranks compare numbers
                self.live[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return out


def tower() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)])


def peak() -> tuple[int, int]:
    model = shard(place(on_meta(tower), flow.placement("cpu:[0-3]")), {"*": S(0)})
    torch.manual_seed(0)
    flow.rand(1, placement=LINE, sbp=B)  # ranks have compared their seeds, and have the buffers to do so
    with Peak() as seen:
        materialise(model)
    weights: list[tuple[str, Any]] = [*model.named_parameters()]
    return seen.most, sum(w.to_local().nbytes for _, w in weights)


def test_a_rank_needs_memory_for_its_shards_and_one_module(ranks4: Ranks) -> None:
    layer = (64 * 64 + 64) * 4
    for most, shards in ranks4(peak):
        assert shards == 16 * layer // 4
        assert shards < most <= shards + layer + 64  # single numbers: is it filled?


def stages() -> list[tuple[str, Tensor]]:
    """A pipeline of two stages; the pieces that this process has."""
    model = on_meta(layers)
    place(model[:2], flow.placement("cpu:[0-1]"))
    place(model[2:], flow.placement("cpu:[2-3]"))
    shard(model, {"*_weight": S(0), "2.*": S(0)})
    torch.manual_seed(3)
    materialise(model, {"2.0.num_batches_tracked": B})
    held: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    return [(name, v.to_local().detach()) for name, v in held if flow.boxing.owned(v.placement)]


def test_every_stage_of_a_pipeline_draws_as_one_process_does(ranks4: Ranks) -> None:
    torch.manual_seed(3)
    plain = values(layers())
    runs = ranks4(stages)
    for mine, other in (runs[:2], runs[2:]):
        for (name, piece), (_, rest) in zip(mine, other, strict=True):
            whole = piece if piece.shape == plain[name].shape else torch.cat([piece, rest])
            assert torch.equal(whole, plain[name]), name
    assert {name for name, _ in (*runs[0], *runs[2])} == set(plain)


def unseeded() -> str:
    rank = flow.boxing.owned(LINE)[0]
    torch.manual_seed(rank // 2)  # alike in each stage
    model = on_meta(tower)
    place(model[:8], flow.placement("cpu:[0-1]"))
    place(model[8:], flow.placement("cpu:[2-3]"))
    with pytest.raises(SbpError) as caught:
        materialise(model)
    return str(caught.value)


def test_stages_with_different_seeds_are_refused(ranks4: Ranks) -> None:
    for said in ranks4(unseeded):
        assert "draw random numbers from different seeds" in said
        assert "rank 1: 0\n  rank 2: 1" in said


def other_values() -> str:
    model = on_meta(tower)
    model[0] = nn.Linear(64, 64)
    with torch.no_grad():
        model[0].bias.fill_(flow.boxing.owned(LINE)[0])
    torch.manual_seed(0)
    with pytest.raises(SbpError) as caught:
        materialise(place(model, LINE))
    return str(caught.value)


def test_ranks_that_have_different_values_already_are_refused(ranks4: Ranks) -> None:
    for said in ranks4(other_values):
        assert said.startswith("materialise: ranks 0 and 1 have different values in 0.")


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
MODELS: dict[str, dict[str, int]] = {
    "GPT2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32},
    "Llama": {**SMALL, "num_key_value_heads": 1},
    "Mixtral": {**SMALL, "num_key_value_heads": 1, "num_local_experts": 4},
}


def hugging(name: str, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    more = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    config = getattr(transformers, f"{name}Config")(**MODELS[name], **more)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{name}{suffix}")(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_get_the_values_of_their_init_weights(name: str) -> None:
    plain: Any = hugging(name, tied=False)
    for module in plain.modules():
        module._is_hf_initialized = False
    torch.manual_seed(4)
    plain.init_weights()
    model = shard(place(on_meta(lambda: hugging(name, tied=False)), GRID), {"*.weight": {"tensor": S(0)}})
    torch.manual_seed(4)
    materialise(model)
    assert same(model, plain)


def test_a_tied_model_of_transformers_stays_tied_and_runs() -> None:
    model: Any = shard(place(on_meta(lambda: hugging("Llama", tied=True)), GRID), {"*mlp.up_proj": {"tensor": S(0)}})
    materialise(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plain: Any = hugging("Llama", tied=True)
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    tokens = torch.arange(12).reshape(2, 6)
    out = model(flow.tensor(tokens, placement=GRID, sbp=B), use_cache=False).logits
    torch.testing.assert_close(out.full_tensor(), plain(tokens, use_cache=False).logits)
