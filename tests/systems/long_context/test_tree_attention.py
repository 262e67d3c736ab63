"""Tree attention and Infinite-LLM's: queries meet keys where these lie, and only what they say of a query is sent."""

import copy
from math import log2
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.nn.composites.ring import Attention, close, compared
from tests.ranks import Ranks

from .sequences import attended, close_on_every_rank, numbers, sent, shards, three

LIES: Any = [B, S(2), S(2)]


def line(ranks: int) -> str:
    return f"cpu:[0-{ranks - 1}] as (context={ranks})"


def decoding(keys: int, **how: Any) -> list[Tensor]:
    query, *rest = three(keys, **how)
    return [query[:, :, :1].contiguous(), *rest]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use", ["tree", "merged"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("keys", [32, 19, 3])
def test_a_query_meets_all_keys(ranks: int, keys: int, use: str) -> None:
    attended(line(ranks), use, "context", decoding(keys), LIES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use", ["tree", "merged"])
@pytest.mark.parametrize(
    "case", ["causal", "shared heads", "mask", "nothing is seen", "one host sees nothing", "heads on another axis"]
)
def test_all_else_that_attention_is_told(use: str, case: str) -> None:
    grid, lies = line(4), LIES
    given, mask, how = three(13), None, {}
    if case == "causal":
        how["is_causal"] = True
    elif case == "shared heads":
        given, how["enable_gqa"] = decoding(13, heads=8, shared=2), True
    elif case == "heads on another axis":
        grid, lies = "cpu:[0-3] as (tensor=2, context=2)", [{"tensor": S(1)}, *[{"tensor": S(1), "context": S(2)}] * 2]
    else:
        hidden = torch.zeros(1, 13, dtype=torch.bool)
        mask = hidden if case == "nothing is seen" else hidden.index_fill(1, torch.arange(4), True)
        mask = numbers(13, 13) > 0 if case == "mask" else mask
    attended(grid, use, "context", given, lies, mask, **how)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use", ["tree", "merged", "ulysses"])
@pytest.mark.parametrize("shape", [(13, 13), (4, 13, 13), (2, 1, 1, 13), (13, 1)])
def test_masks_may_learn(use: str, shape: tuple[int, ...]) -> None:
    close(compared(flow.placement(line(4)), three(13), numbers(*shape, seed=5), use=use))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use", ["tree", "merged", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_are_added_up_in_single(use: str, dtype: torch.dtype) -> None:
    given = [x.to(dtype) for x in three(16)]
    found = compared(flow.placement(line(4)), given, use=use, is_causal=True)
    close(found, 1e-4 if dtype is torch.float32 else 5e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_tree_has_log2_steps_and_each_rank_sends_a_numerator_a_denominator_and_a_maximum(ranks: int) -> None:
    heads, width = 4, 4
    moves = attended(line(ranks), "tree", "context", decoding(19), LIES)
    forward = moves[: int(log2(ranks))]
    assert forward == [("transfer", ranks * 2 * heads * (width + 2) * 8)] * int(log2(ranks))
    assert [route for route, _ in moves].count("transfer") == 2 * int(log2(ranks))  # and as many back


def test_it_is_what_the_ring_computes_with_the_same_bits_on_every_rank() -> None:
    given, where = decoding(19), flow.placement(line(4))
    results: dict[str, Any] = {}
    for use in ("tree", "merged", "ring"):
        model = flow.nn.inside(Attention(), use=use, over="context")
        laid = [flow.tensor(x, placement=where, sbp=sbp) for x, sbp in zip(given, LIES, strict=True)]
        with torch.no_grad():
            results[use] = flow.compile(model, placement=where)(*laid)
    ring = results.pop("ring").full_tensor()
    for found in results.values():
        first, *others = shards(found)
        assert found.sbp == (B,)
        assert all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first, ring, rtol=1e-12, atol=1e-12)


def per_query(use: str, keys: int, heads: int, width: int) -> int:
    model, where = flow.nn.inside(Attention(), use=use, over="context"), flow.placement(line(4))
    given = decoding(keys, heads=heads, width=width)
    laid = [flow.tensor(x, placement=where, sbp=sbp) for x, sbp in zip(given, LIES, strict=True)]
    step = flow.compile(model, placement=where)
    with torch.no_grad(), flow.record() as moves:
        step(*laid)
    return sum(nbytes for _, nbytes in sent(moves))


def counted(use: str, heads: int, width: int, nbytes: int, n: int = 4) -> int:
    """Of one query, of all ranks: numerator, denominator and maximum, in a tree's steps or to each of few others."""
    return (int(log2(n)) if use == "tree" else n - 1) * n * heads * (width + 2) * nbytes


@pytest.mark.parametrize("use", ["tree", "merged"])
@pytest.mark.parametrize(("heads", "width"), [(4, 4), (8, 4), (4, 16)])
def test_bytes_a_query_are_those_of_heads_and_width_however_many_keys_there_are(
    use: str, heads: int, width: int
) -> None:
    for keys in (16, 512):
        assert per_query(use, keys, heads, width) == 2 * counted(use, heads, width, 8)


def test_ranks_that_are_no_power_of_two_merge_in_another_way() -> None:
    with pytest.raises(SbpError, match=r'3 ranks of context are no power of two.*\n.*\n.*say use="merged"'):
        attended(line(3), "tree", "context", decoding(19), LIES)
    attended(line(3), "merged", "context", decoding(19), LIES)


ROOM, WIDTH, HEADS = 22, 16, 4


class Decoder(nn.Module):
    """One token more: its key and value go to their slot, on the host that has it; it looks at all slots so far."""

    def __init__(self, room: int = ROOM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.room = room
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        slot = torch.arange(self.room)
        here = (slot == at)[:, None]
        keys, values = torch.where(here, key, keys), torch.where(here, value, values)
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=(slot <= at)[None])
        return self.out(mixed.transpose(1, 2).flatten(2)), keys, values


def decodes(use: str, tokens: int = ROOM) -> None:
    model = Decoder()
    alone = copy.deepcopy(model)
    flow.nn.inside(model, use=use, over="context")
    where = flow.placement(line(4))
    step = flow.compile(model, placement=where)
    plain = [torch.zeros(1, HEADS, ROOM, WIDTH // HEADS) for _ in range(2)]
    laid: list[Any] = [flow.tensor(x, placement=where, sbp=S(2)) for x in plain]
    bytes_of = set()
    with torch.no_grad():
        for t, x in enumerate(torch.randn(tokens, 1, 1, WIDTH)):
            at = torch.tensor([t])
            with flow.record() as moves:
                found, *laid = step(x, at, *laid)
            want, *plain = alone(x, at, *plain)
            close_on_every_rank([found, *laid], [want, *plain], 1e-5)
            bytes_of.add(sum(nbytes for route, nbytes in sent(moves) if route != "all_gather"))  # of the layers around
    assert {piece.shape[2] for piece in shards(laid[0])} <= {6, 5}  # 22 slots on 4 hosts
    assert bytes_of == {counted(use, HEADS, WIDTH // HEADS, 4)}


@pytest.mark.parametrize("use", ["tree", "merged"])
def test_keys_and_values_grow_over_decoding_host_by_host_and_stay_where_they_are(use: str) -> None:
    decodes(use)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("hosts", "room", "batch"), [(5, 19, 1), (8, 20, 1), (4, 10, 8), (5, 3, 1)])
@pytest.mark.parametrize("dim", [2, 3])
def test_a_cache_stays_in_the_pieces_that_the_hosts_compute_on_however_uneven(
    hosts: int, room: int, batch: int, dim: int
) -> None:
    """Given as S(2) it came back whole; given as S(3) it was sent to and fro at every token."""
    model, where = Decoder(room), flow.placement(line(hosts))
    alone, step = (
        copy.deepcopy(model),
        flow.compile(flow.nn.inside(model, use="merged", over="context"), placement=where),
    )
    plain = [torch.zeros(batch, HEADS, room, WIDTH // HEADS) for _ in range(2)]
    laid: list[Any] = [flow.tensor(x, placement=where, sbp=S(dim)) for x in plain]
    with torch.no_grad():
        for t, x in enumerate(torch.randn(3, batch, 1, WIDTH)):
            with flow.record() as moves:
                found, *laid = step(x, torch.tensor([t]), *laid)
            want, *plain = alone(x, torch.tensor([t]), *plain)
            close_on_every_rank([found, *laid], [want, *plain], 1e-5)
            assert [x.sbp for x in laid] == [(S(2),)] * 2
            assert dim != 2 or not {"all_gather", "all_to_all"} & {route for route, _ in sent(moves)}
    assert "all_to_all" not in {route for route, _ in sent(moves)}  # from the second token on


def test_processes_decode_alike(ranks4: Ranks) -> None:
    ranks4(decodes, "tree", 3)
