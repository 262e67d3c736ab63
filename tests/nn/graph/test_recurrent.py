"""Steps of recurrent nets train as on one device: split, packed, in micro-batches, and in a pipeline."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import sbpflow as flow
from sbpflow.placement.errors import SbpError, ShapeError
from tests.ranks import Ranks

PAIR = flow.placement("cpu", range(2))
GRID = flow.placement("cpu", [[0, 1], [2, 3]])
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, dropout": (nn.LSTM, {"num_layers": 3, "dropout": 0.3, "proj_size": 2}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "rnn": (nn.RNN, {"num_layers": 2, "dropout": 0.4, "nonlinearity": "relu"}),
}
LENGTHS = torch.tensor([3, 5, 1, 5, 2, 4])


class Net(nn.Module):
    """A recurrent net over samples of 5 moments, or over such that end early, and a layer behind it."""

    def __init__(self, kind: str, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        cls, options = KINDS[kind]
        self.first, self.net = batch_first, cls(3, 4, batch_first=batch_first, **options)
        width = options.get("proj_size", 4) * (1 + options.get("bidirectional", False))
        self.last = nn.Linear(width, 2)

    def forward(self, x: Any, lengths: Tensor | None = None, total: int | None = None) -> Tensor:
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=self.first, enforce_sorted=False)
        out, ends = self.net(x)
        if isinstance(out, PackedSequence):
            out, _ = pad_packed_sequence(out, batch_first=self.first, padding_value=0.5, total_length=total)
        end = ends[0] if isinstance(ends, tuple) else ends
        result: Tensor = self.last(out).square().sum() + (end * torch.arange(end.shape[-1])).sum()
        return result


def made(kind: str, batch_first: bool = True) -> Net:
    return Net(kind, batch_first).double()


def values(batch_first: bool = True) -> Tensor:
    x = torch.linspace(-1, 1, 90, dtype=torch.float64).reshape(6, 5, 3)
    return x if batch_first else x.transpose(0, 1).contiguous()


def learns(model: nn.Module, args: tuple[Any, ...], plain: nn.Module, theirs: tuple[Any, ...], **how: Any) -> None:
    """A step gives the loss and the gradients of a plain one, and draws as many numbers."""
    torch.manual_seed(5)
    wanted = plain(*theirs)
    wanted.backward()
    behind = torch.rand(1)
    step = flow.compile(model, lambda model, *args: model(*args), **how)
    step.plan_for(*args)
    torch.manual_seed(5)
    torch.testing.assert_close(step(*args).full_tensor(), wanted, rtol=1e-10, atol=1e-12)
    assert "micro_batches" in how or torch.equal(torch.rand(1), behind)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, flow.GlobalTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["code", "autograd"])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_nets_train_in_a_graph(kind: str, backend: str) -> None:
    for first in (True, False):
        x = values(first)
        learns(made(kind, first), (x,), made(kind, first), (x,), placement=GRID, backend=backend)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_layer_is_one_op_that_code_can_run(kind: str) -> None:
    step = flow.compile(made(kind), lambda model, x: model(x), placement=PAIR, backend="code").plan_for(values())
    layers = KINDS[kind][1].get("num_layers", 1)
    assert step.text().count("sbpflow::recurrent(") == layers
    assert step.planned.plan.whole.reasons == ()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_train_in_a_graph(kind: str) -> None:
    for first in (True, False):
        x, plain = values(first), made(kind, first)
        held = pack_padded_sequence(x, LENGTHS, batch_first=first, enforce_sorted=False)
        learns(made(kind, first), (x, LENGTHS), plain, (x, LENGTHS), placement=GRID)
        plain.zero_grad()
        learns(made(kind, first), (held,), plain, (held,), placement=PAIR)


def staged(model: Net) -> Net:
    flow.nn.place(model.net, flow.placement("cpu", [0]))
    flow.nn.place(model.last, flow.placement("cpu", [1]))
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("many", [2, 4])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_nets_train_in_a_pipeline(kind: str, many: int) -> None:
    x, plain, how = values(), made(kind), {"micro_batches": many, "schedule": "1f1b"}
    held = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    learns(staged(made(kind)), (x,), plain, (x,), **how)
    for args in ((x, LENGTHS), (held,)):
        plain.zero_grad()
        learns(staged(made(kind)), args, plain, args, **how)


def drops(schedule: str, *more: Any) -> Tensor:
    torch.manual_seed(5)
    step = flow.compile(staged(made("rnn")), lambda model, *args: model(*args), micro_batches=3, schedule=schedule)
    value: Tensor = step(values(), *more).full_tensor()
    return value


def test_dropout_of_recurrent_layers_does_not_depend_on_the_schedule() -> None:
    assert torch.equal(drops("1f1b"), drops("gpipe"))
    assert torch.equal(drops("1f1b", LENGTHS), drops("gpipe", LENGTHS))
    assert not torch.equal(drops("1f1b", LENGTHS), drops("1f1b"))


def test_time_first_cannot_be_cut_into_micro_batches() -> None:
    with pytest.raises(
        SbpError, match=r"(?s)sbpflow::recurrent at .*test_recurrent.py:\d+ needs more.*batch_first=True"
    ):
        flow.compile(staged(made("lstm", False)), lambda model, x: model(x), micro_batches=5).plan_for(values(False))


def test_evaluation_goes_without_a_backward() -> None:
    model = made("lstm, dropout").eval()
    wanted = model(values(), LENGTHS)
    with torch.no_grad():
        found = flow.compile(model, placement=PAIR)(values(), LENGTHS)
    torch.testing.assert_close(found.full_tensor(), wanted)


def autocasts(model: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        value: Tensor = model(x).float()
    return value


def test_autocast_reaches_recurrent_layers() -> None:
    model, x = Net("gru"), values().float()
    wanted = autocasts(model, x)
    found = flow.compile(model, autocasts, placement=PAIR)(x)
    torch.testing.assert_close(found.full_tensor(), wanted, rtol=0.02, atol=0)


def test_lengths_that_do_not_fit_are_refused_with_the_line() -> None:
    step = flow.compile(made("lstm"), lambda model, *args: model(*args), placement=PAIR)
    mistakes = {
        (3, 4, 1, 4, 2, 4): r"the longest of samples of 5 moments has 4.*total_length=5",
        (3, 9, 1, 5, 2, 4): r"from 1 to 9",
        (3, 0, 1, 5, 2, 4): r"from 0 to 5",
    }
    for lengths, told in mistakes.items():
        with pytest.raises(SbpError, match=rf"(?s){told}") as caught:
            step(values(), torch.tensor(lengths))
        assert "test_recurrent.py:" in str(caught.value)
    with pytest.raises(ShapeError, match="3 lengths are given for 6 samples"):
        step(values(), LENGTHS[:3])
    with pytest.raises(SbpError, match="enforce_sorted=False"):
        flow.compile(made("lstm"), lambda m, x, n: m(pack_padded_sequence(x, n, True)), placement=PAIR)(
            values(), LENGTHS
        )


def test_a_total_length_pads_as_torch_does() -> None:
    for total, lengths in ((5, torch.tensor([3, 4, 1, 4, 2, 4])), (7, LENGTHS)):
        args = values(), lengths, total
        learns(made("gru"), args, made("gru"), args, placement=PAIR)


PACKED: dict[str, Callable[[PackedSequence], object]] = {
    "sum": lambda held: held.data.sum(),
    "relu": lambda held: torch.relu(held.data),
    "to": lambda held: held.to(torch.float32),
    "batch_sizes": lambda held: held.batch_sizes[1],
    "a result": lambda held: held,
}


@pytest.mark.parametrize("asked", PACKED)
def test_packed_values_are_not_there_while_a_step_is_captured(asked: str) -> None:
    def use(model: Net, x: Tensor, lengths: Tensor) -> object:
        found = PACKED[asked](pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return (model.last.weight.sum(), found)

    with pytest.raises(SbpError, match=rf"capture: .*{asked}.* of a packed sequence, at .*test_recurrent.py:\d+"):
        flow.compile(made("lstm"), use, placement=PAIR).plan_for(values(), LENGTHS)
    assert pack_padded_sequence(values(), LENGTHS, True, False).data.shape == (20, 3)  # as it was


def trains_on_ranks() -> None:
    x = values()
    for kind in ("lstm, dropout", "gru"):
        learns(made(kind), (x, LENGTHS), made(kind), (x, LENGTHS), placement=GRID)
    how: dict[str, Any] = {"micro_batches": 2, "schedule": "1f1b"}
    learns(staged(made("lstm")), (x, LENGTHS), made("lstm"), (x, LENGTHS), **how)


@pytest.mark.sweep
def test_real_ranks_train_recurrent_nets(ranks4: Ranks) -> None:
    ranks4(trains_on_ranks)


def test_another_thread_packs_as_ever_while_a_step_is_captured() -> None:
    """Such as that of a loader, which makes the next batch meanwhile."""
    found: list[PackedSequence] = []

    def build(model: nn.Module, x: Tensor) -> Tensor:
        other = Thread(target=lambda: found.append(pack_padded_sequence(torch.ones(3, 2, 1), [3, 2])))
        other.start()
        other.join()
        return model(x).sum()  # type: ignore[no-any-return]

    flow.compile(nn.Linear(4, 2), build, placement=flow.placement("cpu", range(2)))(torch.ones(2, 4))
    assert found[0].data.shape == (5, 1)
    assert found[0].batch_sizes.tolist() == [2, 2, 1]
