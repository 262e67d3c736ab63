"""Stacked experts: a module that is called with a row of every token for every expert, of which most are zero.

    x [experts x tokens, in]    a token times its share where it chose the expert, zero elsewhere (Llama 4)

Rows that are zero may stay where they are if they make zeros, and no gradient comes back through them. This is tried.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .module_code import ModuleCode, ways_to_see
from .module_probe import ExpertTrial, NoExperts, SeenExperts, Shapes, TokenCall, check_copied

__all__ = ["seen_stacked"]

TOKENS, EVERY = 8, 3  # rows of each expert; one of so many is zero
_grad = torch.autograd.grad  # which a capture replaces meanwhile


def seen_stacked(module: nn.Module, call: TokenCall, shapes: Shapes) -> SeenExperts:
    """The code of a module that is called so; `NoExperts` says that it is no such layer."""
    check_copied(module)
    for seen in ways_to_see(module):
        code = StackedCode(module, seen, call.dims, call.keys)
        for dtype in dict.fromkeys((torch.float64, torch.float32, call.types[0])):
            trial = _StackedTrial(code, call, shapes, dtype)
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    if trial.holds():
                        return SeenExperts(code, *trial.made(), True)
                break
            except Exception:  # as no layer of experts would: it is left to be captured
                continue
    raise NoExperts("zero rows do not stay zero, or experts see each other's rows")


class StackedCode(ModuleCode):
    """A module's forward on the rows of each expert by itself; shares are in the rows."""

    def __call__(
        self, x: Tensor, expert: Tensor, share: Tensor, stacks: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> Tensor:
        order = expert.argsort(stable=True)
        loads = expert.bincount(minlength=len(stacks[0])).tolist()
        made = []
        for at, rows in enumerate(torch.split(x[order], loads)):
            if len(rows):
                given = rows if self.dims[0] == 2 else rows[None]
                out = self.called((given,), [w[at : at + 1] for w in stacks], shared)
                made.append(out.reshape(len(rows), -1))
        return torch.cat(made)[order.argsort()]


class _StackedTrial(ExpertTrial):
    def holds(self) -> bool:
        (stacks, shared), rows = self.weights(), self.count * TOKENS
        x = self.drawn(rows, self.call.width)
        x[::EVERY] = 0.0
        given = x if self.call.dims[0] == 2 else x.view(self.count, TOKENS, -1)
        with torch.enable_grad():
            given.requires_grad_()
            whole = self.code.called((given,), stacks, shared)
            if whole.shape[:-1] != given.shape[:-1]:
                return False
            (back,) = _grad([whole], [given], [self.drawn(*whole.shape)])
        whole = whole.detach().reshape(rows, -1)
        expert = torch.arange(self.count, device="cpu").repeat_interleave(TOKENS)
        each = self.code(x.detach(), expert, torch.ones(rows, device="cpu"), stacks, shared)
        zeros = not whole[::EVERY].any() and not back.reshape(rows, -1)[::EVERY].any()
        return zeros and self.same(each, whole)
