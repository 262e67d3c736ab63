"""The memory of a whole tensor, read off its pieces: which dims follow each other without a gap."""

from collections.abc import Iterable, Sequence

import torch

from ..sbp import Layout
from ..sbp.layout import dense_strides, memory_gaps, memory_order

__all__ = ["as_laid_out", "follows"]


def as_laid_out(of: Layout, pieces: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Layout:
    """The layout with the order in memory that pieces of these shapes and strides have, and gaps where one has some.

    Where they differ in their order it is the order of one of them, and the others are to be copied.

    >>> from ..placement import placement
    >>> from ..sbp import S, layout
    >>> of = layout(placement("cpu:[0-1]"), S(0), (4, 3))
    >>> as_laid_out(of, [((2, 3), (1, 2)), ((2, 3), (1, 2))]).strides
    (1, 4)
    >>> as_laid_out(of, [((2, 3), (6, 2)), ((2, 3), (3, 1))]).strides
    (6, 2)
    """
    held = [(shape, strides) for shape, strides in pieces if 0 not in shape]
    rows = range(len(of.shape))[::-1]
    if all(follows(rows, True, *piece) for piece in held):
        return of
    most = max(held, key=lambda piece: sum(n > 1 for n in piece[0]))[1]
    inward = sorted(rows, key=lambda d: most[d])
    alike = all(_ascend([strides[d] for d in inward if shape[d] > 1]) for shape, strides in held)
    found = _strides(of.shape, held, inward) if alike else dense_strides(of.shape, tuple(inward[::-1]))
    one = torch.empty_strided(of.shape, found, device="meta")
    order, gaps = memory_order(one), memory_gaps(one)
    return Layout(of.placement, of.state, of.shape, of.dtype, of.grad_partial, of.sbp, order, gaps)


def _ascend(strides: list[int]) -> bool:
    return strides == sorted(strides)


def _strides(whole: Sequence[int], held: Sequence[tuple[Sequence[int], Sequence[int]]], inward: list[int]) -> list[int]:
    """Strides in which no dims follow each other that do not in some piece, with the dims from the innermost."""
    found, run, dense, beyond = [0] * len(whole), list[int](), True, 1
    for d in inward:
        steps = {strides[d] for shape, strides in held if shape[d] > 1}
        if steps == {0}:  # expanded
            continue
        if not all(follows((*run, d), dense, *piece) for piece in held):
            run, dense, beyond = [], False, 2 * beyond
        run.append(d)
        found[d] = beyond
        beyond *= whole[d]
    return found


def follows(run: Iterable[int], dense: bool, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these dims, from the innermost, follow each other without a gap; if dense, from one element on.

    >>> follows((1, 0), True, (2, 3), (3, 1)), follows((1, 0), True, (2, 3), (4, 1)), follows((0,), True, (1,), (9,))
    (True, False, True)
    """
    step = 1 if dense else 0
    for d in run:
        if shape[d] > 1:
            if step and strides[d] != step:
                return False
            step = strides[d] * shape[d]
    return True
