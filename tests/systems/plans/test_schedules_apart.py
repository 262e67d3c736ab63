"""Slapo, MT-NLG and overlap by decomposition: a model is written once, and how it runs is said beside it."""

import pytest

from sbpflow.boxing.graph.move_table import moves_of

from ..small import batches, gpt, same_as_one_device

TENSOR = "layers.*.{q,k,v,up}: tensor=S(0)\nlayers.*.{out,down}.weight: tensor=S(1)\n"
SCHEDULES = {
    "shard": "grid (tensor=2)\n" + TENSOR,
    "shard, checkpoint": "grid (tensor=2)\n" + TENSOR + "recompute layers.*\n",
    "shard, checkpoint, pipeline": "grid (pipe=2, tensor=2)\n"
    + TENSOR
    + "recompute layers.*\npipe layers over pipe by 1f1b, 4 micro-batches\n",
    "MT-NLG": "grid (pipe=2, data=2, tensor=2)\n"
    + TENSOR
    + "recompute layers.*\npipe layers over pipe by 1f1b, 4 micro-batches\nstates **: data=S(0)\n",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_model_has_the_same_loss_under_every_schedule(name: str) -> None:
    same_as_one_device(gpt(), plan=SCHEDULES[name], given=batches(2), near=1e-7)


def test_products_in_pieces_wait_for_one_piece_of_as_many_as_ranks() -> None:
    """No message is of more than a piece, and all but the first travel while another is multiplied."""
    plan = "grid (tensor=4)\n" + TENSOR + "layers.*.{norm1,norm2,out,down} -> tensor=S(1)\n"

    def largest(more: str) -> int:
        step = same_as_one_device(gpt(1), plan=plan + more, given=batches(2, length=16), near=1e-7)
        rows = [row for row in moves_of(step.physical) if "layers" in row.name and row.direction == "forward"]
        return max(row.total for row in rows)

    assert largest("inside layers.* use chunked over tensor\n") <= largest("") / 4
