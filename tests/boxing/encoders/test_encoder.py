"""How a tensor is cut for its encoder: shares and pieces as they are, however few elements there are."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from tests.ranks import Ranks
from tests.systems.compression.runs import DATA, encoded_sums, exact_sum

E = flow.encoders
LEVELS = [E.sign(), E.sign(rows=True), E.int8(), E.int4(), E.topk(fraction=1.0)]
TWICE = [
    E.sign(twice=True), E.sign(rows=True, twice=True), E.topk(fraction=0.3, twice=True), E.int8(block=4, twice=True),
    E.int4(twice=True), E.later(steps=1, of=E.int4(twice=True)),
]  # fmt: skip
SHAPES = [(), (0,), (1,), (2,), (5,), (7,), (3, 3), (0, 4), (4, 0)]


def summed(addends: list[Tensor], encoder: Any, sbp: Any = B, *, kept: Any = None) -> Tensor:
    place = flow.placement("cpu", range(len(addends)))
    x: Any = flow.from_local(addends, placement=place, sbp=P)
    return x.to_global(sbp=sbp, encoder=encoder, kept=kept).full_tensor()  # type: ignore[no-any-return]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("encoder", LEVELS, ids=str)
def test_of_one_value_everywhere_every_element_comes_back(encoder: Any, shape: tuple[int, ...], twice: bool) -> None:
    """The last share was filled up with zeros, which a level counted: the last piece of each tensor came back small."""
    by = type(encoder)(**{**vars(encoder), "twice": twice})
    for ranks in (2, 3, 4):
        for sbp in (B, *map(S, range(len(shape)))):
            come = summed([torch.full(shape, 2.0) for _ in range(ranks)], by, sbp)
            torch.testing.assert_close(come, torch.full(shape, 2.0 * ranks), rtol=1e-6, atol=0)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 not in shape], ids=str)
@pytest.mark.parametrize("encoder", TWICE, ids=str)
def test_in_uneven_shares_sent_and_kept_are_the_sum_of_all_addends(encoder: Any, shape: tuple[int, ...]) -> None:
    rounds = [[torch.randn(shape) for _ in DATA] for _ in range(4)]
    sent, kept = encoded_sums(rounds, encoder)
    torch.testing.assert_close(sent.view(shape) + kept.sum(0), exact_sum(rounds), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2,), (5,), (7,), (3, 3)], ids=str)
def test_what_is_kept_of_a_share_is_in_the_error_that_is_shown(shape: tuple[int, ...]) -> None:
    """It was left out: the error of a sum that is encoded twice was half of what was still to come."""
    errors, addends = E.KeptErrors(), [torch.randn(shape) for _ in DATA]
    come = summed([x.clone() for x in addends], E.int4(twice=True), kept=errors["w"])
    errors.commit()
    left = flow.nn.StepErrors(errors).error("w").full_tensor()
    torch.testing.assert_close(come + left, torch.stack(addends).sum(0), rtol=1e-5, atol=1e-5)


def twice_in_a_row(sizes: tuple[int, ...]) -> list[Tensor]:
    """The sums of a third round, also by errors that were written and read between the second and the third."""
    found = []
    for encoder in TWICE:
        for size in sizes:
            errors, ends = E.KeptErrors(), list[Tensor]()
            for at in range(3):
                whole = torch.randn(size, generator=torch.Generator().manual_seed(at))
                x: Any = flow.tensor(whole, placement=DATA, sbp=P) * torch.tensor(0.7)
                if at == 2:
                    again = flow.nn.StepErrors(E.KeptErrors())
                    again.load_state_dict(flow.nn.StepErrors(errors).state_dict())
                    ends.append(x.to_global(sbp=B, encoder=encoder, kept=again.kept["w"]).full_tensor())
                ends.append(x.to_global(sbp=B, encoder=encoder, kept=errors["w"]).full_tensor())
                errors.commit()
            assert torch.equal(ends[-2], ends[-1])
            found.append(ends[-1])
    return found


def test_uneven_shares_are_kept_written_and_read_alike_by_one_process_and_by_four(ranks4: Ranks) -> None:
    mine = twice_in_a_row((2, 5, 7))
    for theirs in ranks4(twice_in_a_row, (2, 5, 7)):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0)


@pytest.mark.parametrize("sbp", [(S(0), B), (B, S(1)), (S(0), S(1))], ids=str)
def test_what_is_left_out_of_a_piece_that_several_ranks_have_is_kept_once(sbp: Any) -> None:
    errors, addends = E.KeptErrors(), [torch.randn(5, 3) for _ in range(4)]
    place = flow.placement("cpu", [[0, 1], [2, 3]])
    x: Any = flow.from_local([each.clone() for each in addends], placement=place, sbp=(P, P))
    come = x.to_global(sbp=sbp, encoder=E.int4(), kept=errors["w"]).full_tensor()
    errors.commit()
    left = flow.nn.StepErrors(errors).error("w").full_tensor()
    torch.testing.assert_close(come + left, torch.stack(addends).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoder", [E.sign(), E.topk(fraction=1.0)], ids=str)
def test_a_sum_of_halves_is_rounded_once(encoder: Any) -> None:
    addends = [torch.tensor([each], dtype=torch.bfloat16) for each in (256.0, 1.0, 1.0, 1.0)]
    assert summed(addends, encoder).item() == 260.0  # 259 has no such half; 256 if each sum is rounded
