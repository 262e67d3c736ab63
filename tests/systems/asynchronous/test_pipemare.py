"""PipeMare: one version of the weights, which a forward reads at its time and its backward at its own."""

import copy
import gc
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors import Schedule, published
from sbpflow.nn.graph.run.weights import weight_versions
from tests.ranks import Ranks

from .letters import held_out_loss, letters, read_loss, reader
from .stages import WIDTH, cut, layers, numbers, ranks, squares, staged, whole

LATE = Schedule("late", act="p-s", low_b="p-s-1", versions="1", unpinned="newest")
APART = Schedule("apart", split=True, act="p-s", stash="p", dy="s+1", low_b="p-s-1", low_w="s", versions="1",
                 unpinned="newest")  # fmt: skip


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_a_forward_is_as_many_updates_late_as_published(p: int) -> None:
    m = 4 * p
    found = published("pipemare").delays(p, m)
    for s in range(p):
        full = 2 * (p - s) - 1
        assert found.forward[s] == Counter(min(k, full) for k in range(m))  # the line fills, and then all are alike
        assert found.backward[s] == {0: m}


def test_a_step_tells_the_delay_of_each_parameter() -> None:
    step = staged(layers(4), "pipemare", 12).plan_for(*numbers(24))
    assert step.delays().forward == published("pipemare").delays(4, 12).forward
    assert step.delays().parameters == {
        f"{s}.0.{name}": 2 * (4 - s) - 1 for s in range(4) for name in ("weight", "bias")
    }


def reference(model: nn.Sequential, m: int, steps: int, *, corrected: bool, lr: float = 0.1) -> list[Tensor]:
    """Every layer a stage: its forward on weights as they were 2(p-s)-1 updates before its backward's."""
    p = len(model)
    weights = [[x.detach().clone() for x in layer.parameters()] for layer in model]
    mean = [[torch.zeros_like(x) for x in each] for each in weights]
    for _ in range(steps):
        known = [[[x.clone() for x in each]] for each in weights]
        for k, (x, y) in enumerate(cut(*numbers(2 * m), m)):
            seen, kept = [max(0, k - 2 * (p - s) + 1) for s in range(p)], []
            for s in range(p):
                w, b = known[s][seen[s]]
                kept.append((x, out := (x @ w.T + b).tanh()))
                x = out
            d = 2 * (x - y) / x.numel()
            for s in reversed(range(p)):
                x, out = kept[s]
                late = k - seen[s]
                w = known[s][k][0] - mean[s][0] * late if corrected and late else known[s][k][0]
                d = d * (1 - out * out)
                grads, d = (d.T @ x, d.sum(0)), d @ w
                known[s].append([a - lr * g for a, g in zip(known[s][k], grads, strict=True)])
                decay = 0.135 ** (1 / (2 * (p - s) - 1))
                pairs = zip(mean[s], known[s][k], known[s][k + 1], strict=True)
                mean[s] = [v * decay + (new - old) * (1 - decay) for v, old, new in pairs]
        weights = [each[-1] for each in known]
    return [x for each in weights for x in each]


@pytest.mark.parametrize(("name", "corrected"), [("pipemare", False), ("pipemare_corrected", True)])
def test_a_step_is_the_recurrence_of_the_paper(name: str, corrected: bool) -> None:
    model = layers(4)
    expected = reference(copy.deepcopy(model), 12, 2, corrected=corrected)
    step = staged(model, name, 12)
    for _ in range(2):
        step(*numbers(24))
    torch.testing.assert_close(whole(model), expected, rtol=0, atol=1e-12)


def trained(schedule: str | Schedule, m: int = 12) -> list[Tensor]:
    model = layers(4)
    step = staged(model, schedule, m)
    for at in range(2):
        step(*numbers(2 * m, at))
    return whole(model)


@pytest.mark.parametrize("schedule", ["pipemare_corrected", LATE, APART], ids=str)
def test_it_is_the_same_each_time(schedule: str | Schedule) -> None:
    """Threads keep to the order of the simulation, also where marks leave it open."""
    assert all(map(torch.equal, trained(schedule), trained(schedule)))


@pytest.mark.sweep
def test_four_processes_train_as_one(ranks4: Ranks) -> None:
    expected = trained("pipemare_corrected")
    for found in ranks4(trained, "pipemare_corrected"):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("schedule", "live"), [("pipemare", 4), ("pipemare_corrected", 4), ("pipedream", 4 + 3 + 2 + 1)]
)
def test_one_version_of_each_stage_is_live(schedule: str, live: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there: WeakSet[Any] = WeakSet()
    most = 0

    class Counted(weight_versions.Version):
        def __init__(self, shards: Any) -> None:
            super().__init__(shards)
            there.add(self)

    model = layers(4)
    step = staged(model, schedule, 12)
    monkeypatch.setattr(weight_versions, "Version", Counted)
    after = weight_versions.WeightVersions.updated

    def counted(self: Any, *args: Any) -> Any:
        nonlocal most
        made = after(self, *args)
        most = max(most, len({x.data_ptr() for one in there for w, (x, *_) in one.shards.items() if "weight" in w}))
        return made

    monkeypatch.setattr(weight_versions.WeightVersions, "updated", counted)
    gc.disable()  # nothing may wait for it
    step(*numbers(24))
    gc.enable()
    assert most == live
    assert not any(name.startswith("w.") for name in step.planned.program.proved.proof.peak) or schedule == "pipedream"  # type: ignore[union-attr]


def learned(schedule: str, steps: int, m: int = 32) -> float:
    """The loss of text that a model of bytes has not seen, in four stages, with an update for every 16 samples."""
    model = reader()
    flow.nn.pipeline(model.layers, ranks(4), schedule)
    step = flow.compile(
        model, read_loss, torch.optim.AdamW(model.parameters(), lr=2e-3), micro_batches=m, schedule=schedule
    )
    for at in range(steps):
        step(*letters(16 * m, at))
    return held_out_loss(model)


def alone(steps: int, m: int = 32) -> float:
    model = reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for at in range(steps):
        for x, y in cut(*letters(16 * m, at), m):
            optimizer.zero_grad()
            read_loss(model, x, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return held_out_loss(model)


@pytest.mark.sweep
def test_a_model_of_bytes_learns_as_well_as_in_step() -> None:
    plain = alone(10)
    assert plain < 3.3  # it began with 4.9
    assert abs(learned("pipemare_corrected", 10) / plain - 1) < 0.02


TURN = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)).double()).Q
TURN[:, 0] *= torch.det(TURN).sign()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("again", [False, True])
def test_rates_that_begin_smaller_where_weights_are_late_go_further(again: bool) -> None:
    """T1 of the paper, on a turn of the plane that four linear layers learn together."""

    def far(anneal: int) -> float:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
        for layer in model:
            nn.init.eye_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        flow.nn.pipeline(model, ranks(4), "pipemare")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        step = flow.compile(model, squares, optimizer, micro_batches=16, schedule="pipemare")
        x, _ = numbers(64, 0)
        step.plan_for(x, x @ TURN)
        if again:  # also when the step has taken the optimizer over
            step(x[:0].new_zeros(64, WIDTH), x.new_zeros(64, WIDTH))
        rates = flow.nn.DelayedLR(optimizer, step, anneal=anneal)
        if anneal > 1:
            assert rates.get_last_lr() == pytest.approx([0.3, 0.3 / 3, 0.3 / 5, 0.3 / 7])
        for at in range(12):
            x, _ = numbers(64, at)
            loss: float = step(x, x @ TURN).item()
            rates.step()
        if anneal > 1:
            assert [group["delay"] for group in optimizer.param_groups] == [1, 3, 5, 7]
            assert rates.get_last_lr() == [0.3] * 4
        return loss

    assert far(10) < 1e-3 * far(1)


def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With the groups that rates have split, and how far these have come."""

    def made() -> tuple[nn.Sequential, torch.optim.Optimizer, flow.nn.Graph, flow.nn.DelayedLR]:
        model = layers(4)
        flow.nn.pipeline(model, ranks(4), "pipemare")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = flow.compile(model, squares, optimizer, micro_batches=12, schedule="pipemare").plan_for(*numbers(24))
        return model, optimizer, step, flow.nn.DelayedLR(optimizer, step, anneal=5)

    model, optimizer, step, rates = made()
    other, its, again, its_rates = made()
    for at in range(4):
        if at == 2:
            flow.save(tmp_path / "at", model, optimizer=optimizer, extra={"rates": rates})
            flow.load(tmp_path / "at", other, optimizer=its, extra={"rates": its_rates})
        for each, scheduler in ((step, rates), (again, its_rates))[: 1 if at < 2 else 2]:
            each(*numbers(24, at))
            scheduler.step()
    assert all(map(torch.equal, whole(model), whole(other)))
    assert rates.get_last_lr() == its_rates.get_last_lr()


def test_what_cannot_be() -> None:
    x, y = numbers(24)
    with pytest.raises(flow.SbpflowError, match="unpinned 'late' is no way"):
        Schedule("mine", versions="1", unpinned="late")  # type: ignore[arg-type]
    with pytest.raises(flow.SbpflowError, match="unpinned weights are there once: versions 1"):
        Schedule("mine", versions="2", unpinned="newest")
    assert Schedule.read(str(LATE)) == LATE
    with pytest.raises(flow.SbpflowError, match="updates weights behind all micro-batches"):
        published("1f1b").delays(4, 8)
    step = staged(layers(4), "1f1b", 12)
    with pytest.raises(flow.SbpflowError, match="not called yet"):
        step.delays()
    with pytest.raises(flow.SbpflowError, match="1f1b has a flush, so no weight is read late"):
        flow.nn.DelayedLR(torch.optim.SGD([torch.zeros(1)]), step.plan_for(x, y), anneal=3)
    with pytest.raises(flow.SbpflowError, match="no norm of all gradients"):
        staged(layers(4), "pipemare", 12, clip_grad_norm=1.0)(x, y)
    with pytest.raises(flow.SbpflowError, match="keeps the weights of a forward by reference"):
        staged(layers(4), "pipemare", 12, backend="autograd")(x, y)
    step = staged(layers(4), "pipemare", 12).plan_for(x, y)
    with pytest.raises(flow.SbpflowError, match="no parameter that the graph trains"):
        flow.nn.DelayedLR(torch.optim.SGD([torch.zeros(1)]), step, anneal=3)
    with pytest.raises(flow.SbpflowError, match="anneal=0"):
        flow.nn.DelayedLR(torch.optim.SGD([torch.zeros(1)]), step, anneal=0)


def test_weights_of_two_stages_or_computed_ones_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x) @ self.layers[0][0].weight  # type: ignore[index]
            return y

    def step_of(model: nn.Module, parts: nn.Module, loss: Any) -> flow.nn.Graph:
        flow.nn.pipeline(parts, ranks(2), "pipemare")  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return flow.compile(model, loss, optimizer, micro_batches=4, schedule="pipemare")

    tied = Tied()
    with pytest.raises(flow.SbpflowError, match="a weight is used on two groups of ranks"):
        step_of(tied, tied.layers, squares)(*numbers(8))

    def narrow(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return nn.functional.mse_loss(out.float(), y)

    model, (x, y) = layers(2).float(), numbers(8)
    with pytest.raises(flow.SbpflowError, match=r"makes something of .* alone"):
        step_of(model, model, narrow)(x.float(), y.float())
    model = layers(2).float()
    flow.nn.cast(model, {"*": torch.bfloat16})  # the fix that the error names
    assert step_of(model, model, squares)(x.bfloat16(), y.bfloat16()).isfinite()


def test_rates_are_split_before_other_schedulers_know_the_groups() -> None:
    """A scheduler with a rule for each group left those alone that were made of them."""
    model = layers(3)
    flow.nn.pipeline(model, ranks(3), "pipemare")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = flow.compile(model, squares, optimizer, micro_batches=6, schedule="pipemare").plan_for(*numbers(12))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5)
    with pytest.raises(flow.SbpError, match="make DelayedLR first"):
        flow.nn.DelayedLR(optimizer, step, anneal=3)
