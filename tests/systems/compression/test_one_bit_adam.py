"""1-bit Adam: plain Adam for some steps, then its variance stays and its momentum is what ranks send, as signs."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, SbpError
from sbpflow.boxing.encoders.named import encoder_of
from tests.ranks import Ranks
from tests.systems.compression.runs import DATA, batch, loss_fn, net, sent_bytes, step_of, trained, weights

WARM, BETA = 20, 0.9


class OneBitAdam(torch.optim.Optimizer):
    """Adam while it warms up; then what comes is the momentum, and the variance is that of the last warm step."""

    def __init__(self, parameters: Any, lr: float, warm: int) -> None:
        super().__init__(parameters, {"lr": lr, "warm": warm})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in (x for x in group["params"] if x.grad is not None):
                state = self.state[x]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(x), square=torch.zeros_like(x))
                state["step"] += 1
                if state["step"] <= group["warm"]:
                    state["mean"].lerp_(x.grad, 1 - BETA)
                    state["square"].mul_(0.999).addcmul_(x.grad, x.grad, value=0.001)
                else:
                    state["mean"].copy_(x.grad)
                many = min(state["step"], group["warm"])
                mean = state["mean"] / (1 - BETA ** state["step"])
                x.addcdiv_(mean, (state["square"] / (1 - 0.999**many)).sqrt() + 1e-8, value=-group["lr"])


def one_bit_adam(model: torch.nn.Module, warm: int) -> Any:
    encoder = flow.encoders.momentum(beta=BETA, steps=warm, of=flow.encoders.sign(twice=True))
    return step_of(model, {"*": encoder}, OneBitAdam(model.parameters(), 0.003, warm))


def test_warm_steps_are_those_of_adam() -> None:
    mine, theirs = net(), net()
    losses = trained(one_bit_adam(mine, WARM), WARM)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.003)
    for at in range(WARM):
        loss = loss_fn(theirs, *batch(at))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        assert losses[at] == pytest.approx(loss.item(), rel=1e-4)


def test_momentum_that_ranks_have_is_the_plain_one_but_for_errors_that_are_kept() -> None:
    """Of linear recurrences: the momentum of all gradients is what was sent, and what errors become with time."""
    encoder, errors = flow.encoders.momentum(beta=BETA, steps=2, of=flow.encoders.sign()), flow.encoders.KeptErrors()
    plain = sent = torch.zeros(16, 4)
    before = torch.zeros(16, 4, dtype=torch.float64)
    for at in range(8):
        addends = [torch.randn(16, 4) for _ in DATA]
        x = flow.from_local([a.clone() for a in addends], placement=DATA, sbp=P)
        come = x.to_global(sbp=B, encoder=encoder, kept=errors["w"]).full_tensor()
        rows = errors.rows_of("w")
        assert rows is not None
        kept = torch.stack([each.get("error", torch.zeros(16, 4)).double() for each in rows.ranks]).sum(0)
        wanted = BETA * sent.double() + (1 - BETA) * torch.stack(addends).double().sum(0) + before
        plain = BETA * plain + (1 - BETA) * torch.stack(addends).sum(0)
        if at < 2:
            assert torch.allclose(come, torch.stack(addends).sum(0), atol=1e-5)
            sent = plain
        else:
            sent = come
            assert (come.double() + kept - wanted).abs().max() < 1e-5
        before = kept
        assert all(torch.equal(each["momentum"], rows.ranks[0]["momentum"]) for each in rows.ranks)


def test_after_the_warm_steps_a_thirtieth_of_the_bytes_is_sent_and_it_converges() -> None:
    model, plain = net(128), net(128)
    step = one_bit_adam(model, WARM)
    first = sent_bytes(step)
    coded = trained(step, 60, 1)
    assert sent_bytes(step, 61) < first / 28  # levels and the loss are in it
    adam = trained(step_of(plain, None, torch.optim.Adam(plain.parameters(), lr=0.003)), 61)
    assert sum(adam[-20:]) < 0.5 * sum(adam[:20])
    assert sum(coded[-20:]) < 1.1 * sum(adam[-20:])


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Any) -> None:
    model = net()
    step = one_bit_adam(model, 3)
    trained(step, 6)
    with pytest.raises(flow.SbpError, match="extra="):
        flow.save(tmp_path / "lost", model, optimizer=step.optimizer)
    flow.save(tmp_path / "six", model, optimizer=step.optimizer, extra={"kept": step.kept})
    ends = trained(step, 4, 6)
    other = net()
    again = one_bit_adam(other, 3)
    trained(again, 1, 99)  # in another state
    flow.load(tmp_path / "six", other, optimizer=again.optimizer, extra={"kept": again.kept})
    assert trained(again, 4, 6) == ends
    fresh = copy.deepcopy(net())
    third = one_bit_adam(fresh, 3)
    flow.load(tmp_path / "six", fresh, optimizer=third.optimizer, extra={"kept": third.kept})
    assert trained(third, 4, 6) == ends


def resumed(folder: str) -> tuple[list[float], list[float]]:
    model = net()
    step = one_bit_adam(model, 3)
    trained(step, 5)
    flow.save(folder, model, optimizer=step.optimizer, extra={"kept": step.kept})
    ends = trained(step, 3, 5)
    other = net()
    again = one_bit_adam(other, 3)
    flow.load(folder, other, optimizer=again.optimizer, extra={"kept": again.kept})
    return ends, trained(again, 3, 5)


def test_four_processes_go_on_to_the_same_bits(ranks4: Ranks, tmp_path: Any) -> None:
    for ends, again in ranks4(resumed, str(tmp_path / "five")):
        assert again == ends


def test_errors_of_other_ranks_or_encoders_are_refused() -> None:
    first, two = one_bit_adam(net(), 3), net()
    trained(first, 4)
    place = flow.placement("cpu:[0-1] as (data=2)")
    other = step_of(two, {"*": flow.encoders.momentum(beta=BETA, steps=3)}, placement=place)
    other.kept.load_state_dict(first.kept.state_dict())
    with pytest.raises(flow.SbpError, match="another run"):
        other(*batch(0))


def test_weights_stay_alike_on_all_ranks() -> None:
    model = net()
    trained(one_bit_adam(model, 2), 6)
    for weight in weights(model).values():
        shards: list[Tensor] = weight.to_local()
        assert all(torch.equal(shards[0], other) for other in shards)


def test_what_is_done_to_a_gradient_is_not_done_to_the_momentum_that_is_kept() -> None:
    """Clipping scales gradients in place."""
    encoder = flow.encoders.momentum(beta=BETA, steps=0, of=flow.encoders.sign())
    step = step_of(net(), {"2.weight": encoder}, clip_grad_norm=1e-6)
    step(*batch(0))
    rows = step.kept.kept.rows_of("2.weight")
    assert rows is not None
    assert rows.ranks[0]["momentum"].norm() > 1e-3


@pytest.mark.parametrize("kind", [flow.encoders.later, flow.encoders.momentum], ids=lambda kind: kind.name)
@pytest.mark.parametrize("said", [{"twice": True}, {"feedback": False}], ids=str)
def test_what_is_said_of_a_phase_is_of_the_encoder_that_it_has(kind: Any, said: dict[str, bool]) -> None:
    """It was read by nobody: sums were encoded once, and errors were kept, whatever was said."""

    def come(encoder: flow.encoders.Encoder) -> list[Tensor]:
        errors, found = flow.encoders.KeptErrors(), []
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            x: Any = flow.from_local([torch.randn(6, 4, generator=draw) for _ in range(4)], placement=DATA, sbp=P)
            found.append(x.to_global(sbp=B, encoder=encoder, kept=errors["x"]).full_tensor())
        return found

    sign = flow.encoders.sign
    outer, inner, plain = (come(each) for each in (kind(**said), kind(of=sign(**said)), kind()))
    assert all(map(torch.equal, outer, inner))
    assert not all(map(torch.equal, outer, plain))


def test_a_phase_hands_on_what_is_refused_and_is_read_back() -> None:
    with pytest.raises(flow.SbpError, match="nothing is encoded twice"):
        flow.encoders.later(steps=1, of=flow.encoders.low_rank(), twice=True)
    outer = flow.encoders.later(steps=2, of=flow.encoders.momentum(steps=1), twice=True)
    assert outer.of.of.twice  # type: ignore[attr-defined]
    assert encoder_of(str(outer)) == outer
    assert outer.steady == flow.encoders.sign(twice=True)


class OwnInitEncoder(flow.encoders.Encoder):
    """Made from a number alone, by an __init__ of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        object.__setattr__(self, "scale", scale)


@dataclass(frozen=True, kw_only=True)
class FieldEncoder(flow.encoders.Encoder):
    """The same, by a field: the fix."""

    scale: float


def test_an_encoder_that_cannot_be_told_what_its_phase_is_told_is_refused_and_fields_mend_it() -> None:
    with pytest.raises(SbpError, match=r"later\(twice=True.* cannot tell its OwnInitEncoder.*\n  .*a field for each"):
        flow.encoders.later(steps=1, of=OwnInitEncoder(2.0), twice=True)
    assert flow.encoders.later(steps=1, of=OwnInitEncoder(2.0)).of.twice is False
    assert flow.encoders.later(steps=1, of=FieldEncoder(scale=2.0), twice=True).of.twice is True
