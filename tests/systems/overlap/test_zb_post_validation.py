"""ZB's post-validation: stages step before the others are done, and the result is the synchronous one to the bit."""

from itertools import product
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors import Actor, Added, Take
from sbpflow.actors.protocol.state import Firing
from sbpflow.nn.graph.microbatch_runner import MicroBatchRunner
from sbpflow.nn.graph.run.bound_tasks import BoundTask
from sbpflow.nn.graph.tasks.task import Name
from sbpflow.placement.errors import SbpError, SbpflowError

from .stages import ADAMW, SGD, Trained, loss_fn, plan_of, same, trained

ASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "never clipped": {"clip_grad_norm": 100.0},
    "always clipped": {"clip_grad_norm": 0.1},
    "clipped at times": {"clip_grad_norm": 0.45},
    "inf": {"skip_nonfinite": True, "spoilt": (0, 2)},
    "inf and clipped": {"skip_nonfinite": True, "clip_grad_norm": 0.45, "spoilt": (1,)},
    "overflow": {"loss_scale": 2.0**120, "skip_nonfinite": True, "spoilt": (1,)},
    "scaled": {"loss_scale": 8.0, "clip_grad_norm": 0.45},
}
GRID = list(product(["1f1b", "zb_h2", "zb_v", "bfpp", "gpipe"], [1, 2], [ADAMW, SGD], ASKS, [False, True]))


def runner_of(made: Trained) -> MicroBatchRunner:
    ((step,),) = made.step._steps.values()
    assert isinstance(step.runner, MicroBatchRunner)
    return step.runner


@pytest.mark.sampled(3, sweep=160)
@pytest.mark.parametrize(("schedule", "ranks", "optimizer", "asks", "overlap"), GRID)
def test_a_step_is_the_synchronous_one_to_the_bit(
    schedule: str, ranks: int, optimizer: Any, asks: str, overlap: bool
) -> None:
    how = dict(ASKS[asks], ranks=ranks, optimizer=optimizer)
    one = trained(schedule, **how)
    made = trained(schedule, **how, post_validation=True, overlap=overlap)
    same(one, made)
    if "clip_grad_norm" in how:
        assert str(one.step.grad_norm.item()) == str(made.step.grad_norm.item())
    if "skip_nonfinite" in how:
        assert str(one.step.skipped) == str(made.step.skipped)


def whole(model: nn.Module) -> None:
    flow.nn.shard(model, {"*": B})


def zero1(model: nn.Module) -> None:
    whole(model)
    flow.nn.shard(model, {"*": S(0)}, "states")


def zero2(model: nn.Module) -> None:
    whole(model)
    flow.nn.shard(model, {"*": S(0)}, ["grads", "states"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rests", [whole, zero1, zero2])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("asks", ["clipped at times", "inf and clipped"])
def test_so_it_is_where_optimizers_have_pieces_or_wider_copies(rests: Any, kind: str, asks: str) -> None:
    def said(model: nn.Module) -> None:
        rests(model)
        if kind != "fp32":
            flow.nn.cast(model, {"*": kind})

    how = dict(ASKS[asks], ranks=2, said=said, steps=4)
    same(trained("1f1b", **how), trained("1f1b", **how, post_validation=True, overlap=True))


@pytest.mark.parametrize("asks", ["never clipped", "clipped at times", "inf"])
def test_chunks_that_stepped_are_taken_back_where_the_whole_says_so(asks: str) -> None:
    """The norm of the last stage alone is below the limit, with those before it it is not."""
    how = dict(ASKS[asks], stages=4, steps=4)
    made = trained("1f1b", **how, post_validation=True)
    same(trained("1f1b", **how), made)
    validation = runner_of(made).validation
    assert validation is not None
    assert (validation.undone > 0) == (asks == "clipped at times")  # an infinity of the loss is known to all stages


def test_an_infinity_of_the_first_stage_takes_back_the_others() -> None:
    """Its gradients alone are not finite, and come home last."""
    how: dict[str, Any] = {"skip_nonfinite": True, "steps": 2, "stages": 4}

    made = _spoilt_below(True, **how)
    same(_spoilt_below(False, **how), made)
    validation = runner_of(made).validation
    assert validation is not None
    assert (validation.undone, made.step.skipped.count) == (3, 1)
    assert made.step.skipped.first.startswith("the gradient of 0.")


def _spoilt_below(post_validation: bool, **how: Any) -> Trained:
    """With inputs so large that their own layer's gradients are not finite, which its outputs hide."""
    return trained("1f1b", **how, post_validation=post_validation, huge=(1,))


def test_the_last_stage_steps_before_the_first_has_done_its_last_backward() -> None:
    """The last backward of the first stage waits here until the last stage has stepped: with a barrier it would wait
    for ever."""
    made = trained("1f1b", stages=3, clip_grad_norm=0.45, post_validation=True, steps=1)
    program, validation, stepped = plan_of(made), runner_of(made).validation, Event()
    assert validation is not None
    begun, step = program.bound.begun, validation.step
    last = program.proved.count - 1

    def stepping(chunk: int, known: torch.Tensor) -> None:
        step(chunk, known)
        if chunk == last:
            stepped.set()

    def begins(entry: BoundTask, k: int, firing: Firing) -> Any:
        if (entry.name, k) == (Name("B", 0), len(program.proved.kinds) - 1):
            assert stepped.wait(20)
        return begun(entry, k, firing)

    validation.step = stepping  # type: ignore[method-assign]
    program.bound.begun = begins  # type: ignore[method-assign]
    made.step(torch.zeros(16, 8), torch.ones(16, 8))
    assert stepped.is_set()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_nothing_is_exchanged_by_all_stages(schedule: str) -> None:
    """In the synchronous step a norm goes from stage to stage before any steps, and a flag around all ranks."""
    ranks = {
        post: {len(move.boxing.ranks) for move in _moves(schedule, post) if move.op not in ("hop", "same values")}
        for post in (False, True)
    }
    assert max(ranks[False]) == 6
    assert max(ranks[True]) <= 2


def _moves(schedule: str, post: bool) -> Any:
    return trained(
        schedule, stages=3, ranks=2, count=3, clip_grad_norm=0.45, skip_nonfinite=True, post_validation=post
    ).moves


def test_frozen_layers_several_groups_and_a_second_optimizer() -> None:
    def split(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, second, third, fourth = (list(layer.parameters()) for layer in model.children())
        for x in second:
            x.requires_grad_(False)
        groups = [{"params": first[:1], "lr": 0.01}, {"params": [*first[1:], *third], "weight_decay": 0.1}]
        return [torch.optim.AdamW(groups, lr=0.05), torch.optim.SGD(fourth, lr=0.05)]

    how: dict[str, Any] = {"optimizer": split, "clip_grad_norm": 0.3}
    same(trained("1f1b", **how), trained("1f1b", **how, post_validation=True))


class Own(torch.optim.SGD):
    """A kind of which nothing is known."""


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def compiled(model: nn.Module, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
    flow.nn.place(model[0], flow.placement("cpu", [0]))  # type: ignore[index]
    flow.nn.place(model[1], flow.placement("cpu", [1]))  # type: ignore[index]
    step = flow.compile(model, loss_fn, optimizer(model.parameters(), lr=0.1), post_validation=True, **options)
    step(torch.ones(4, 8), torch.ones(4, 8))


def test_refused_where_a_stage_cannot_step_by_itself() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for model, optimizer, options, said in (
        (plain, torch.optim.SGD, {}, "no micro-batches"),
        (plain, torch.optim.SGD, {"schedule": "pipedream", "micro_batches": 2}, "under which weights change"),
        (plain, torch.optim.SGD, {"schedule": "chimera", "micro_batches": 2}, "on two routes"),
        (plain, Own, {"micro_batches": 2}, "Own may look at more"),
        (tied(), torch.optim.SGD, {"micro_batches": 2}, "is of several"),
    ):
        with pytest.raises(SbpflowError, match=said):
            compiled(model, optimizer, **options)


def test_gradients_that_are_there_already_are_refused() -> None:
    made = trained("1f1b", clip_grad_norm=1.0, post_validation=True, steps=1)
    ((step,),) = made.step._steps.values()
    weight = next(iter(step.model.trained.values())).parameter
    weight.grad = weight.detach()
    with pytest.raises(SbpError, match="has a gradient from outside"):
        made.step(torch.ones(16, 8), torch.ones(16, 8))


def broken(**options: Any) -> tuple[Any, list[str], bool]:
    """A step whose first stage fails in its last micro-batch, behind the optimizer of the last: it, the notes of the
    error, and whether weights are what they were."""
    made, stepped = trained("1f1b", stages=2, post_validation=True, steps=0, **options), Event()
    optimizer, at_last = made.step.optimizer, torch.optim.AdamW.step

    def step() -> None:
        at_last(optimizer)
        stepped.set()

    def fail(firing: Firing) -> list[Any]:
        if firing.label == 3 and spoil:
            assert stepped.wait(20)
            raise ValueError("broken")
        return []

    x, y, spoil = torch.ones(16, 8), torch.zeros(16, 8), False
    behind = Actor("behind", "device 0", (Take("dy.0"),), kind=-1)
    made.step.plan_for(x, y).add(lambda network: Added(network.adding([behind]), {"behind": fail}))
    made.step(x, y)
    before = [value.full_tensor().clone() for value in made.step.model.state_dict().values()]
    optimizer.step, spoil = step, True
    stepped.clear()
    with pytest.raises(ValueError, match="broken") as told:
        made.step(x, y)
    del optimizer.step
    spoil = False
    after = [value.full_tensor() for value in made.step.model.state_dict().values()]
    return made.step, told.value.__notes__, all(map(torch.equal, before, after))


def test_an_error_takes_back_the_chunks_that_had_stepped() -> None:
    """They stayed so, without a word: a model of which a half is a step ahead."""
    step, notes, same_weights = broken(clip_grad_norm=100.0)
    assert same_weights
    assert len(notes) == 1  # where it was
    other = trained("1f1b", stages=2, steps=0).step
    for each in (step, other, other):
        each(torch.ones(16, 8), torch.zeros(16, 8))
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(step.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    )


def test_where_nothing_is_kept_an_error_says_which_chunks_had_stepped() -> None:
    _, notes, same_weights = broken()
    assert not same_weights
    assert "stepped the optimizers of chunks 1 of 2" in notes[-1]


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}])
def test_hooks_of_steps_are_refused(options: Any) -> None:
    """They were called for every chunk, and for steps that were taken back."""

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = ADAMW(model)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(SbpError, match="AdamW has a hook of its steps"):
        trained("1f1b", optimizer=hooked, post_validation=True, **options)
