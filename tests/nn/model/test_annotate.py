"""What is said of models: placements and hints, where they are kept, and how they print."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn import annotations, place, shard
from sbpflow.nn.model.annotate import checked_hints, checked_rests, chunk_of, hints_of, placement_of
from sbpflow.nn.model.balance import open_cuts
from sbpflow.placement.errors import PlacementError, SbpError, SbpflowError, ShapeError

P0, P1 = flow.placement("cpu:[0-1] as (tensor=2)"), flow.placement("cpu:[2-3] as (tensor=2)")
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.up, self.act, self.down = nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n, bias=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("mask", torch.zeros(3))


def homes(model: nn.Module, *paths: str) -> list[flow.Placement | None]:
    found = placement_of({"": model})
    return [found.get(path) for path in paths]


def test_a_module_lives_where_the_nearest_around_it_does() -> None:
    model = Net()
    assert place(model, GRID) is model
    place(model.blocks[1], P1)
    assert homes(model, "", "emb", "blocks.0.up", "blocks.1", "blocks.1.up") == [GRID, GRID, GRID, P1, P1]


@pytest.mark.parametrize("outer_first", [True, False])
def test_the_order_in_which_nested_modules_are_placed_does_not_matter(outer_first: bool) -> None:
    for net, outer in ((model := Net(), model.blocks), (chain := nn.Sequential(*Net().blocks), chain)):
        inner = outer[1]
        for module, where in ((outer, P0), (inner, P1))[:: 1 if outer_first else -1]:
            place(module, where)
        path = next(name for name, module in net.named_modules() if module is inner)
        assert homes(net, path, f"{path}.up") == [P1, P1]
        assert set(placement_of({"": net}).values()) == {P0, P1}


@pytest.mark.parametrize("kind", ["modules", "sequential", "list", "tuple"])
def test_a_slice_places_the_modules_in_it(kind: str) -> None:
    model = Net()
    model_of: dict[str, type] = {"modules": nn.ModuleList, "list": list, "tuple": tuple}
    whole: Any = nn.Sequential(*model.blocks) if kind == "sequential" else model_of[kind](model.blocks)
    place(whole[:3], P0)
    place(whole[2:], P1)  # the later counts where both reach
    assert homes(model, "", "blocks", "blocks.0", "blocks.1.up", "blocks.2", "blocks.3") == [None, None, P0, P0, P1, P1]


@pytest.mark.parametrize("kind", ["modules", "sequential"])
def test_a_slice_that_is_placed_later_counts_as_its_modules_do(kind: str) -> None:
    """It is in no model: what was said of it was lost where `pipeline` had placed the layers themselves."""
    layers: Any = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    layers = nn.Sequential(*layers) if kind == "sequential" else layers
    net = nn.ModuleDict({"layers": layers})
    flow.nn.pipeline(layers, [P0, P1])
    place(layers, GRID)  # what is said of the list itself is not said of those that have a word of their own
    place(layers[1:3], P1, chunk=5)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    for each in (net, twin):
        assert homes(each, "layers", *(f"layers.{n}" for n in range(4))) == [GRID, P0, P1, P1, P1]
        assert [chunk_of({"": each})[f"layers.{n}"] for n in range(4)] == [0, 5, 5, 1]
    assert open_cuts([net]) == []  # nor does a plan cut them anew
    place(layers[1:2], None)
    assert homes(net, "layers.1", "layers.2") == [GRID, P1]
    flow.nn.pipeline(layers, [P0, P1])
    assert homes(net, *(f"layers.{n}" for n in range(4))) == [P0, P0, P1, P1]


def test_none_takes_a_placement_back() -> None:
    model = place(place(Net(), GRID), None)
    place(model.blocks[:2], P0)
    place(model.blocks, None)
    assert placement_of({"": model}) == {}


def test_a_module_that_is_used_twice_lives_with_each_of_its_parents() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    place(model, GRID)
    assert homes(model, "0.0", "1.0") == [GRID, GRID]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_what_was_said_and_do_not_share_it(name: str) -> None:
    model = place(Net(), GRID)
    shard(model, {"blocks.*.up": {"tensor": S(0)}, "emb": (B, S(1))})
    twin = COPIES[name](model)
    assert placement_of({"": twin}) == placement_of({"": model})
    assert hints_of({"": twin}) == hints_of({"": model})
    place(twin, P0)
    shard(twin, {"emb": B})
    assert placement_of({"": model})[""] is GRID
    assert hints_of({"": model})["emb.weight"] == (B, S(1))


def test_the_model_itself_stays_as_it_was() -> None:
    model, plain = Net(), Net()
    shard(place(model, GRID), {"*": B})
    assert list(model.state_dict()) == list(plain.state_dict())
    assert str(model) == str(plain)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.emb(torch.arange(3)), plain.emb(torch.arange(3)))


def test_patterns_name_parameters_and_modules() -> None:
    model = Net()
    assert shard(model, {"blocks.*.up.weight": S(0), "blocks.1.norm": "S(0)", "head": {"tensor": "S(1)"}}) is model
    assert hints_of({"": model}) == {
        **{f"blocks.{n}.up.weight": S(0) for n in range(4)},
        **{f"blocks.1.norm.{name}": S(0) for name in ("weight", "bias")},
        **{f"{name}.weight": {"tensor": S(1)} for name in ("emb", "head")},  # they are one parameter
    }


def test_of_one_dict_the_first_pattern_counts_and_of_calls_the_last() -> None:
    model = Net()
    shard(model, {"blocks.0.up.weight": S(1), "blocks.*.up.weight": S(0)})
    shard(model, {"blocks.3.up": B})
    found = [hints_of({"": model})[f"blocks.{n}.up.weight"] for n in range(4)]
    assert found == [S(1), S(0), S(0), B]
    assert hints_of({"": model})["blocks.3.up.bias"] is B
    shard(model, {"*": None})
    assert hints_of({"": model}) == {}


def test_hints_are_said_of_a_part_and_read_of_the_whole() -> None:
    model = Net()
    shard(model.blocks[2], {"up.weight": S(0)})
    assert hints_of({"": model}) == {"blocks.2.up.weight": S(0)}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "blocks.*.upp.weight",
            "shard: Net has no parameter or module called 'blocks.*.upp.weight'\n"
            "  it has 21 parameters, such as emb.weight, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.weight\n"
            "  did you mean 'blocks.*.up.weight'?",
        ),
        ("blocks.0.dwon", "did you mean 'blocks.0.down'"),
        ("mask", "see all names: print(flow.nn.annotations(model))"),
        ("blocks.0.act", "no parameter or module called 'blocks.0.act'"),
    ],
)
def test_a_pattern_that_names_nothing(pattern: str, said: str) -> None:
    with pytest.raises(SbpError) as caught:
        shard(Net(), {pattern: S(0)})
    assert said in str(caught.value)


def test_a_hint_that_the_shape_does_not_allow_changes_nothing() -> None:
    model = Net()
    with pytest.raises(ShapeError) as caught:
        shard(model, {"emb": S(0), "blocks.*.up": (B, S(1))})
    assert str(caught.value) == (
        "shard: S(1) of blocks.0.up.bias (8,), which the pattern 'blocks.*.up' names\n  it has 1 dim\n"
        '  give it a signature of its own before that pattern, as in flow.nn.shard(model, {"blocks.0.up.bias": flow.B,'
        " ...})"
    )
    with pytest.raises(ShapeError, match=r"S\(-3\) of emb.weight \(9, 4\).*\n  its dims are 0 to 1"):
        shard(model, {"emb": {"tensor": S(-3)}})
    assert hints_of({"": model}) == {}


def test_what_is_no_module_placement_or_signature_is_told() -> None:
    with pytest.raises(PlacementError, match="expected a module or a list of modules, found Parameter"):
        place(nn.Linear(2, 2).weight, P0)  # type: ignore[type-var]
    with pytest.raises(PlacementError, match="expected a module or a list of modules, found str"):
        place([nn.Linear(2, 2), "head"], P0)  # type: ignore[type-var]
    with pytest.raises(PlacementError, match="expected a placement, found 'cpu:0'"):
        place(nn.Linear(2, 2), "cpu:0")  # type: ignore[arg-type]
    with pytest.raises(SbpError, match="S is no signature of an axis\n  write S"):
        shard(nn.Linear(2, 2), {"*": S})  # type: ignore[dict-item]


def test_two_hints_for_what_was_tied_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard(model, {"0.weight": S(0), "1.weight": S(1)})
    model[1].weight = model[0].weight
    with pytest.raises(SbpError, match=r"(?s)two hints\n  as 0.weight: S\(0\)\n  as 1.weight: S\(1\)\n.*say it once"):
        hints_of({"": model})
    shard(model, {"1.weight": S(1)})
    assert hints_of({"": model}) == {"0.weight": S(1), "1.weight": S(1)}


def test_hints_become_signatures_where_the_placement_is_known() -> None:
    model = shard(Net(), {"emb": {"tensor": S(-1)}, "blocks.0.up.weight": (S(0), S(1)), "blocks.1.up": "B"})
    everywhere = dict.fromkeys(dict(model.named_parameters(remove_duplicate=False)), GRID)
    assert checked_hints({"": model}, everywhere) == {
        "emb.weight": (B, S(1)),
        "head.weight": (B, S(1)),
        "blocks.0.up.weight": (S(0), S(1)),
        "blocks.1.up.weight": (B, B),
        "blocks.1.up.bias": (B, B),
    }


def test_hints_that_do_not_fit_the_placement() -> None:
    model = shard(Net(), {"emb": {"model": S(0)}})
    names = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(PlacementError, match=r"(?s)^emb.weight \(9, 4\) is to be \{'model': S\(0\)\} on .*no axis 'mo"):
        checked_hints({"": model}, dict.fromkeys(names, GRID))
    with pytest.raises(SbpError, match=r"(?s)^blocks.0.up.bias \(8,\) .* has 1 entries, .* 2 axes.*say it anew"):
        checked_hints({"": shard(Net(), {"blocks.0.up.bias": (S(0),)})}, dict.fromkeys(names, GRID))
    with pytest.raises(SbpError, match=r"(?s)has no placement\n  say where it lives, as in flow.nn.place"):
        checked_hints({"": model}, {})


def test_a_model_prints_with_what_was_said_of_it() -> None:
    model = Net()
    place(model.blocks[:3], GRID)
    place(model.blocks[3:], P1)
    shard(model, {"blocks.[0-2].up": {"tensor": S(0)}, "emb": "S(1)"})
    assert str(annotations(model)) == PRINTED.strip("\n")


PRINTED = """
                 shape   dtype    signature          on a rank  in all
Net
  mask (buffer)  (3,)    float32                                  12 B
  emb: Embedding
    weight       (9, 4)  float32  hint S(1)                      144 B
  blocks: ModuleList
    (0-2): Block  on cpu:[0-3] as (data=2, tensor=2)
      norm: LayerNorm
        weight   (4,)    float32                                  16 B
        bias     (4,)    float32                                  16 B
      up: Linear
        weight   (8, 4)  float32  hint tensor: S(0)       64 B   128 B
        bias     (8,)    float32  hint tensor: S(0)       16 B    32 B
      down: Linear
        weight   (4, 8)  float32                                 128 B
    3: Block  on cpu:[2-3] as (tensor=2)
      norm: LayerNorm
        weight   (4,)    float32                                  16 B
        bias     (4,)    float32                                  16 B
      up: Linear
        weight   (8, 4)  float32                                 128 B
        bias     (8,)    float32                                  32 B
      down: Linear
        weight   (4, 8)  float32                                 128 B
  head: Linear
    weight       (9, 4)  float32  is emb.weight
356 parameters in 21 tensors, 1.39 KiB; at most 240 B on a rank, without 16 of which that is not known
"""


def test_a_global_model_prints_with_how_it_lies() -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4, bias=False))
    flow.nn.to_global(model[0], GRID, {"weight": (B, S(0))})
    flow.nn.to_global(model[1], P1, S(0))
    place(model, GRID)
    assert str(annotations(model)) == GLOBAL.strip("\n")


GLOBAL = """
            shape   dtype    signature                           on a rank  in all
Sequential  on cpu:[0-3] as (data=2, tensor=2)
  0: Linear
    weight  (9, 4)  float32  (B, S(0))                                80 B   144 B
    bias    (9,)    float32  (B, B)                                   36 B    36 B
  1: Linear
    weight  (4, 9)  float32  (S(0),) on cpu:[2-3] as (tensor=2)       72 B   144 B
81 parameters in 3 tensors, 324 B; at most 188 B on a rank
"""


def test_lists_that_differ_are_not_folded_and_meta_and_lazy_models_print() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 3))
    shown = str(annotations(model))
    assert [line.strip() for line in shown.splitlines() if ": Linear" in line] == [
        "(0-1): Linear",
        "3: Linear",
        "4: Linear",
    ]
    assert shown.endswith("27 parameters in 8 tensors, 108 B; on meta, without values")
    assert "weight  not known yet  float32" in str(annotations(shard(nn.Sequential(nn.LazyLinear(3)), {"*": S(0)})))


# Gradients and states


def test_kinds_have_hints_of_their_own() -> None:
    model = shard(Net(), {"blocks.*.up.weight": S(1)})
    shard(model, {"*": {"data": S(0)}}, kind=("grads", "states"))
    shard(model, {"blocks.0": None}, kind="grads")
    assert "blocks.0.up.weight" in hints_of({"": model}, "states")
    assert "blocks.0.up.weight" not in hints_of({"": model}, "grads")
    assert hints_of({"": model})["blocks.1.up.weight"] == S(1)
    assert "grads data: S(0); states data: S(0)" in str(flow.nn.annotations(model))


def test_a_hint_for_states_names_axes_and_says_nothing_of_others() -> None:
    model = shard(Net(), {"blocks.0.up.weight": {"tensor": S(-1)}, "blocks.1.up.weight": S(0)}, kind="states")
    shard(model, {"blocks.0.up.weight": {"data": None}})
    where = dict.fromkeys([name for name, _ in model.named_parameters()], GRID)
    tensor, both = GRID.axis("tensor"), tuple((axis, S(0)) for axis in range(GRID.ndim))
    found = checked_rests({"": model}, where, "states")
    assert found == {"blocks.0.up.weight": ((tensor, S(1)),), "blocks.1.up.weight": both}
    assert checked_hints({"": model}, where)["blocks.0.up.weight"][GRID.axis("data")] is None
    assert checked_rests({"": model}, {}, "states") == {}  # what lives nowhere is in no step


@pytest.mark.parametrize(
    ("sbp", "kind", "said"),
    [
        (P, "states", "added up before they are kept"),
        ({"data": P}, ("weights", "grads"), "grads of '[*]'"),
        (S(0), "gradients", "known are 'weights', 'grads', 'states'"),
        (S(0), (), "known are"),
    ],
)
def test_a_kind_that_cannot_be(sbp: Any, kind: Any, said: str) -> None:
    with pytest.raises(SbpError, match=said):
        shard(Net(), {"*": sbp}, kind=kind)


def test_a_hint_for_states_that_does_not_fit_its_placement() -> None:
    model = shard(Net(), {"blocks.0.up.weight": {"rows": S(0)}}, kind="states")
    with pytest.raises(SbpflowError, match=r'states of blocks.0.up.weight .*\n(.*\n)*.*kind="states"'):
        checked_rests({"": model}, {"blocks.0.up.weight": GRID}, "states")


def test_patterns_have_alternatives_and_ranges_too() -> None:
    model = Net()
    shard(model, {"blocks.[1:].{up,down}.weight": S(0), "blocks.[-1].norm": B})
    assert sorted(hints_of({"": model})) == [
        *(f"blocks.{n}.{name}.weight" for n in (1, 2) for name in ("down", "up")),
        *(f"blocks.3.{name}" for name in ("down.weight", "norm.bias", "norm.weight", "up.weight")),
    ]
    with pytest.raises(SbpError, match=r"this \{ is not closed\n  blocks.\{up\n         \^"):
        shard(model, {"blocks.{up": B})
