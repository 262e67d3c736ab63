"""One seed, one sequence of numbers: those that plain torch draws, on any number of ranks and in any layout."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from tests.ranks import Ranks

Lie: TypeAlias = tuple[str, Any]

LINE2, LINE4, GRID = "cpu:[0-1]", "cpu:[0-3]", "cpu:[0-3] as (data=2, tensor=2)"
LIES: list[Lie] = [
    ("cpu:[0]", B),
    ("cpu:[0]", S(0)),
    (LINE2, B),
    (LINE2, S(0)),
    (LINE2, S(1)),
    (LINE4, B),
    (LINE4, S(0)),
    (LINE4, S(1)),
    (GRID, (S(0), S(1))),
    (GRID, (S(1), S(0))),
    (GRID, (S(0), S(0))),
    (GRID, (S(1), B)),
    (GRID, (B, S(0))),
]
SHAPE = (7, 5)  # divides by neither 2 nor 4

# The tensor that an initializer of torch fills, in place.
INITIALIZERS: dict[str, Callable[[Tensor], object]] = {
    "uniform_": lambda w: nn.init.uniform_(w, -1, 2),
    "normal_": lambda w: nn.init.normal_(w, 1, 2),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=2.0),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "constant_": lambda w: nn.init.constant_(w, 3),
    "eye_": nn.init.eye_,
    "Tensor.uniform_": lambda w: w.uniform_(),
    "Tensor.normal_": lambda w: w.normal_(),
    "Tensor.bernoulli_": lambda w: w.bernoulli_(0.3),
    "Tensor.exponential_": lambda w: w.exponential_(),
    "Tensor.random_": lambda w: w.random_(0, 9),
}

# What is drawn for a tensor that is there.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.4), 0.4),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
}


# Tensors that do not lie row by row in one device's memory, in whose order it draws.
LAST = torch.channels_last
PERMUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(3, 1, 0, 2) + 1,
    "made contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "copied": lambda x: x.mT.clone(),
    "cast": lambda x: x.mT.float().double(),
    "a part": lambda x: x.mT[:, :, 1:],
    "broadcast": lambda x: x[:1].expand(4, -1, -1, -1).mT,
    "softmax": lambda x: x.mT.softmax(1),
    "reduced": lambda x: x.permute(2, 1, 0, 3).sum(1),
    "like it": lambda x: torch.zeros_like(x.mT),
    "reshaped": lambda x: x.mT.reshape(4, -1),
    "channels last": lambda x: x.to(memory_format=LAST),
    "convolution": lambda x: F.conv2d(x.to(memory_format=LAST), torch.ones(3, 4, 2, 2, dtype=x.dtype)),
    "group norm": lambda x: F.group_norm(x.to(memory_format=LAST), 2),
    "rolled": lambda x: x.to(memory_format=LAST).roll(1, 1),
    "mirrored": lambda x: F.pad(x.to(memory_format=LAST), (1, 1, 1, 1), mode="reflect"),
    "repeated at the edge": lambda x: F.pad(x.to(memory_format=LAST), (1, 1, 1, 1), mode="replicate"),
    "shuffled": lambda x: F.channel_shuffle(x.to(memory_format=LAST), 2),
    "classes": lambda x: F.one_hot((x.mT > 0).long()).double(),
    "normalised": lambda x: F.batch_norm(x.mT.contiguous().mT, None, None, training=True),
    "turned": lambda x: x.to(memory_format=LAST).rot90(1, (2, 3)),
    "chosen by a mask": lambda x: x.mT.contiguous().mT[:, torch.tensor([True, False, True, True])],
    "channels with gaps": lambda x: x.to(memory_format=LAST)[:, ::2],
    "attention": lambda x: F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3, dropout_p=0.0),
    "tokens of an image": lambda x: F.conv2d(x, torch.ones(3, 4, 2, 2, dtype=x.dtype)).flatten(2).transpose(1, 2),
}
KINDS: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.dropout(x, 0.5),
    torch.rand_like,
    lambda x: torch.randn_like(x.clone()),
    lambda x: x.clone().uniform_(),
    lambda x: torch.bernoulli(x.sigmoid()),
    lambda x: F.alpha_dropout(x, 0.5, training=True),
]
CUBE = torch.linspace(-1, 1, 2 * 4 * 5 * 3, dtype=torch.float64).reshape(2, 4, 5, 3)


def laid(lie: Lie, whole: Tensor) -> Any:
    return flow.tensor(whole, placement=flow.placement(lie[0]), sbp=lie[1])


def drawn(draw: Callable[[Tensor], object], x: Tensor) -> Tensor:
    """What is drawn for x from seed 5, or what x is then, and one number more, to see how many were used."""
    torch.manual_seed(5)
    out = draw(x)
    out = out if isinstance(out, Tensor) else x
    return torch.cat([whole(out).flatten().double(), torch.rand(1).double()])


def whole(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, flow.GlobalTensor) else tensor
    assert type(full) is Tensor
    return full.detach()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_weight_is_filled_with_the_same_numbers(name: str) -> None:
    wanted = drawn(INITIALIZERS[name], torch.zeros(SHAPE))
    for lie in LIES:
        assert torch.equal(drawn(INITIALIZERS[name], laid(lie, torch.zeros(SHAPE))), wanted), lie


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_numbers_are_drawn_for_a_tensor(name: str) -> None:
    values = torch.linspace(-1, 2, 35).reshape(SHAPE)
    wanted = drawn(DRAWS[name], values)
    for lie in LIES:
        assert torch.equal(drawn(DRAWS[name], laid(lie, values)), wanted), lie


@pytest.mark.parametrize("name", ["dropout", "rand_like", "bernoulli"])
def test_a_partial_tensor_draws_the_same_numbers(name: str) -> None:
    values = torch.linspace(-1, 2, 35).reshape(SHAPE)
    assert torch.equal(drawn(DRAWS[name], laid((LINE4, P), values)), drawn(DRAWS[name], values))


def test_split_sizes_drop_the_same_numbers() -> None:
    """Torch fills 16 numbers at a time with other ones than it would one by one, so sizes matter."""
    for size in (0, 1, 3, 15, 16, 17, 64, 100):
        for draw in (torch.randn_like, torch.rand_like, lambda x: F.dropout(x, 0.5)):
            wanted = drawn(draw, torch.ones(size))
            assert torch.equal(drawn(draw, laid((LINE4, S(0)), torch.ones(size))), wanted), size


FACTORIES: dict[str, Callable[..., Any]] = {
    "rand": lambda **where: flow.rand(*SHAPE, **where),
    "randn": lambda **where: flow.randn(*SHAPE, **where),
    "randint": lambda **where: flow.randint(-5, 90, SHAPE, **where),
}
PLAIN: dict[str, Callable[[torch.Generator], Tensor]] = {
    "rand": lambda seed: torch.rand(SHAPE, generator=seed),
    "randn": lambda seed: torch.randn(SHAPE, generator=seed),
    "randint": lambda seed: torch.randint(-5, 90, SHAPE, generator=seed),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_seeded_factory_draws_what_torch_draws_from_the_seed(name: str) -> None:
    for where, sbp in LIES:
        out = FACTORIES[name](placement=flow.placement(where), sbp=sbp, seed=3)
        assert torch.equal(whole(out), PLAIN[name](torch.Generator().manual_seed(3))), (where, sbp)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_without_a_seed_draws_from_the_default_generator(name: str) -> None:
    for where, sbp in LIES:
        torch.manual_seed(4)
        out = FACTORIES[name](placement=flow.placement(where), sbp=sbp)
        assert torch.equal(whole(out), PLAIN[name](torch.Generator().manual_seed(4))), (where, sbp)


def test_a_seed_of_its_own_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    flow.rand(*SHAPE, placement=flow.placement(LINE2), sbp=S(0), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_gradient_of_dropout_is_masked_alike() -> None:
    values = torch.linspace(-1, 2, 35).reshape(SHAPE)
    plain = values.clone().requires_grad_()
    leaves = [laid(lie, values).requires_grad_() for lie in LIES]
    for x in (plain, *leaves):
        torch.manual_seed(6)
        (F.dropout(x, 0.4) * 3).sum().backward()  # type: ignore[no-untyped-call]
    assert plain.grad is not None
    for x, lie in zip(leaves, LIES, strict=True):
        assert torch.equal(whole(x.grad), plain.grad), lie


def test_dropout_inside_attention_drops_the_same_weights() -> None:
    q, k, v = torch.randn(3, 3, 4, 6, 2).unbind()
    torch.manual_seed(7)
    wanted = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    for lie in [(LINE2, S(0)), (LINE2, S(1)), (LINE4, S(1)), (GRID, (S(0), S(1)))]:
        torch.manual_seed(7)
        out = F.scaled_dot_product_attention(laid(lie, q), laid(lie, k), laid(lie, v), dropout_p=0.5)
        torch.testing.assert_close(whole(out), wanted)


def test_a_model_made_on_one_device_and_one_made_in_pieces_start_alike() -> None:
    """Parameters may be drawn before or after they are laid out."""
    torch.manual_seed(8)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    pieces = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    flow.nn.to_global(pieces, flow.placement(LINE4), S(0))
    torch.manual_seed(8)
    for layer in pieces:
        assert isinstance(layer, nn.Linear)
        layer.reset_parameters()
    for mine, wanted in zip(pieces.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(mine), wanted)


def everything_drawn() -> list[Tensor]:
    """For the layouts that four ranks can have."""
    values = torch.linspace(-1, 2, 35).reshape(SHAPE)
    out = []
    for lie in [(LINE4, B), (LINE4, S(0)), (GRID, (S(0), S(1)))]:
        out += [drawn(draw, laid(lie, values)) for draw in DRAWS.values()]
        out += [drawn(fill, laid(lie, torch.zeros(SHAPE))) for fill in INITIALIZERS.values()]
    return out


def test_real_ranks_draw_the_same_numbers(ranks4: Ranks) -> None:
    wanted = everything_drawn()
    for run in ranks4(everything_drawn):
        assert all(torch.equal(mine, value) for mine, value in zip(run, wanted, strict=True))


def told(draw: Callable[[], object]) -> str:
    """What an error says, and how often ranks compared notes until it came."""
    with flow.record() as moves:
        try:
            draw()
            said = ""
        except flow.SbpflowError as error:
            said = str(error)
    return f"{sum(move.op == 'seeds' for move in moves)} {said}"


def drawn_unseeded(seed_of: Callable[[int], int]) -> list[str]:
    """Every way to draw numbers, by ranks that were seeded so."""
    line, said = flow.placement(LINE4), []
    for n, draw in enumerate(
        [
            lambda: F.dropout(flow.ones(8, placement=line, sbp=S(0))),
            lambda: flow.rand(8, placement=line, sbp=B),
            lambda: flow.zeros(8, placement=line, sbp=B).normal_(),
            lambda: torch.rand_like(flow.ones(8, placement=line, sbp=S(0))),
            lambda: torch.multinomial(flow.ones(8, placement=line, sbp=B), 2),
        ]
    ):
        torch.manual_seed(100 * n + seed_of(flow.boxing.owned(line)[0]))
        said += [told(draw), told(draw)]
    return said


def own_seed(rank: int) -> int:
    return rank


def same_seed(rank: int) -> int:
    return 2**63 + 3


def test_ranks_with_different_seeds_do_not_draw(ranks4: Ranks) -> None:
    for run in ranks4(drawn_unseeded, own_seed):
        for n, text in enumerate(run):
            assert text.startswith("1 ranks of placement"), text
            assert f"rank 3: {100 * (n // 2) + 3}\n" in text
            assert "torch.manual_seed(0)" in text


def test_seeds_are_compared_once(ranks4: Ranks) -> None:
    for run in ranks4(drawn_unseeded, same_seed):
        assert run == ["1 ", "0 "] * 5


def seeded_by_the_call() -> list[str]:
    line = flow.placement(LINE4)
    torch.manual_seed(flow.boxing.owned(line)[0])
    mine = torch.Generator().manual_seed(5)
    return [
        told(lambda: flow.rand(8, placement=line, sbp=B, seed=3)),
        told(lambda: flow.zeros(8, placement=line, sbp=S(0)).uniform_(generator=mine)),
        told(lambda: flow.ones(8, placement=line, sbp=S(0)) + 1),
    ]


def test_what_does_not_draw_from_the_common_seed_needs_none(ranks4: Ranks) -> None:
    assert all(run == ["0 "] * 3 for run in ranks4(seeded_by_the_call))


def test_ranks_of_one_process_have_memory_of_their_own() -> None:
    for sbp in (B, S(0), P):
        drawn_like = torch.rand_like(flow.ones(8, placement=flow.placement(LINE4), sbp=sbp))
        assert torch.equal(drawn_like.zero_().add_(1).full_tensor(), torch.ones(8))  # type: ignore[attr-defined]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PERMUTED)
def test_numbers_are_drawn_in_the_order_of_one_devices_memory(name: str) -> None:
    for draw in KINDS:

        def run(x: Tensor, draw: Callable[[Tensor], Tensor] = draw) -> Tensor:
            return draw(PERMUTED[name](x))

        wanted = drawn(run, CUBE)
        for lie in LIES:
            assert torch.allclose(drawn(run, laid(lie, CUBE)), wanted), lie


def test_a_model_that_transposes_drops_the_same_values() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True).double()
    x = CUBE[..., 0].mT.contiguous()
    wanted = drawn(layer, x)
    flow.nn.to_global(layer, flow.placement(LINE2))
    assert torch.allclose(drawn(layer, laid((LINE2, S(0)), x)), wanted)


@pytest.mark.parametrize("name", ["transposed", "permuted", "channels last", "convolution", "rolled", "mirrored"])
def test_a_graph_draws_in_the_order_of_one_devices_memory(name: str) -> None:
    class Step(flow.nn.Graph):
        def build(self, x: Tensor) -> Any:
            y = PERMUTED[name](x * 2)
            return F.dropout(y, 0.5) + torch.rand_like(y)

    wanted = drawn(lambda x: F.dropout(y := PERMUTED[name](x * 2), 0.5) + torch.rand_like(y), CUBE)
    for lie in [("cpu:[0]", B), (LINE2, S(0)), (LINE2, S(1))]:
        step = Step(placement=flow.placement(lie[0]))
        assert torch.allclose(drawn(step, laid(lie, CUBE)), wanted)


ASKED: dict[str, Callable[[Tensor], Any]] = {
    "stride": lambda x: x.T.stride(),
    "one stride": lambda x: x.T.stride(0),
    "a view of it": lambda x: x.T.view(-1).tolist(),
    "a reshape of it": lambda x: x.T.reshape(-1).tolist(),
    "contiguous": lambda x: (x.T.is_contiguous(), x.T.contiguous().is_contiguous(), x.T.T.is_contiguous()),
    "strides of a copy": lambda x: (x.T.clone().stride(), x.T.contiguous().stride()),
    "channels last": lambda x: x.view(1, 7, 5, 1).to(memory_format=LAST).is_contiguous(memory_format=LAST),
    "a step": lambda x: (x[:, ::2].stride(), x[:, ::2].is_contiguous(), x[1:3, 1:].stride(), x[:2].is_contiguous()),
    "a view of a step": lambda x: x[:, ::2].view(-1).tolist(),
    "what is made of a step": lambda x: (x[:, ::2].clone().stride(), (x[:, ::2] + 1).stride(), x.T[::2].exp().stride()),
    "repeated": lambda x: (
        x[:1].expand(4, 5).stride(),
        x[:1].expand(4, 5).is_contiguous(),
        x[None].expand(2, 7, 5).stride(),
    ),
    "parts": lambda x: [(y.stride(), y.is_contiguous()) for y in (*x.chunk(2, 1), *x.unbind(1), x.diagonal(), x[:, 1])],
    "a part detached": lambda x: (x[:, ::2].detach().stride(), x[:, ::2].detach().requires_grad_().is_contiguous()),
    "a part moved nowhere": lambda x: (x[:, ::2].to(x.dtype).stride(), x[:, ::2].contiguous().is_contiguous()),
    "strides of what was made like it": lambda x: torch.empty_like(x.T).stride(),
}


@pytest.mark.parametrize("name", ASKED)
def test_strides_are_those_of_one_device(name: str) -> None:
    def answer(x: Tensor) -> Any:
        try:
            return ASKED[name](x)
        except RuntimeError as error:
            return str(error).partition("(")[0]

    x = torch.arange(35.0).reshape(SHAPE)
    assert [answer(laid(lie, x)) for lie in LIES] == [answer(x)] * len(LIES)
