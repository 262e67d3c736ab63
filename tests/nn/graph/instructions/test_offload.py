"""Ways to the host and back: what goes, when it comes back, what stays, and how much less the device holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sbpflow as flow
from sbpflow.nn.graph.instructions.computing import Backward, Forward, SegmentWork
from sbpflow.nn.graph.instructions.instruction import Instruction
from sbpflow.nn.graph.instructions.offload import Fetch, Land, Stow
from sbpflow.nn.graph.instructions.overlap import Free
from sbpflow.nn.graph.lower.registers import LocalRegister
from sbpflow.placement.cluster import cluster, default_cluster
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import same, same_model
from tests.ranks import Ranks

ONE, TWO = (flow.placement(f"cpu:[0-{n - 1}] as (data={n})") for n in (1, 2))
PIPE = flow.placement("cpu:[0-3] as (pipe=2, data=2)")
WIDTH, WIDE, ROWS = 8, 64, 64
TO = pytest.mark.parametrize("to", ["cpu", "disk"])


class Block(nn.Module):
    """Keeps its input and the result of tanh for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).tanh())
        return out


class Net(nn.Module):
    def __init__(self, blocks: int = 6, *, again: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.again = again
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(drop)) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        out: Tensor = self.head(x)
        return out


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, n, generator=draw, dtype=torch.float64) for n in (WIDTH, 4))
    return x, y


def step_of(model: nn.Module, where: flow.Placement | None = ONE, **options: Any) -> Any:
    return flow.compile(model, loss_fn, torch.optim.Adam(model.parameters()), placement=where, **options)


def offloaded(model: Net, to: Any = "cpu", ahead: int | None = None, patterns: str = "blocks.*") -> Net:
    flow.nn.offload(model, patterns, "saved", to=to, ahead=ahead)
    return model


def todo(step: Any) -> tuple[Instruction, ...]:
    done: tuple[Instruction, ...] = step.planned.program.schedule.todo
    return done


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_what_was_saved_comes_back_so_many_segments_ahead(ahead: int) -> None:
    step = step_of(offloaded(Net(), ahead=ahead))
    step(*batch())
    order = todo(step)
    stows, fetches, lands = ({do.reads[0]: at for at, do in enumerate(order) if isinstance(do, kind)} for kind in WAYS)
    assert len(stows) == len(fetches) == len(lands)
    assert sum(x.kind == "saved" for x in stows) == 6 - ahead // 2  # those of the last would come back at once
    for x, at in stows.items():
        (away,) = order[at].writes
        (coming,) = order[fetches[away]].writes
        (landed,) = order[lands[coming]].writes
        reader = next(n for n, do in enumerate(order) if landed in do.reads)
        assert isinstance(order[reader], Backward)
        between = [do for do in order[fetches[away] : reader] if isinstance(do, SegmentWork)]
        assert len(between) == ahead
        assert not [do for do in order[lands[coming] : reader] if isinstance(do, SegmentWork)]
        before = [do for do in order[:at] if isinstance(do, SegmentWork)]
        assert x in before[-1].writes or x in before[-1].reads  # behind its last use in the forward
        assert any(isinstance(do, Free) and x in do.reads for do in order[at : at + 2])
        assert any(isinstance(do, SegmentWork) for do in order[at : fetches[away]])


WAYS = Stow, Fetch, Land


def test_what_others_read_or_nothing_runs_beside_stays() -> None:
    step = step_of(offloaded(Net(), patterns="blocks.2"))
    step(*batch())
    names = [do.reads[0] for do in todo(step) if isinstance(do, Stow)]
    assert [x.kind for x in names] == ["saved", "value"]  # of the one block: what it saves, and its input
    every = step_of(offloaded(Net(), patterns="*"))
    every(*batch())
    saved = [do.number for do in todo(every) if isinstance(do, Forward)]
    gone = [do.reads[0].number for do in todo(every) if isinstance(do, Stow) and do.reads[0].kind == "saved"]
    assert gone == saved[:-1]  # the backward of the last comes at once


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", [ONE, TWO], ids=["one", "two"])
@TO
def test_values_are_bitwise_the_same(to: str, where: flow.Placement) -> None:
    for again, drop in ((False, 0.0), (False, 0.3), (True, 0.3)):
        mine, other = offloaded(Net(again=again, drop=drop), to), Net(again=again, drop=drop)
        step, plain = step_of(mine, where), step_of(other, where)
        for _ in range(5):
            torch.manual_seed(7)
            loss = step(*batch())
            torch.manual_seed(7)
            assert torch.equal(loss.full_tensor(), plain(*batch()).full_tensor())
        same_model(mine, other, 0)


@pytest.mark.parametrize("blocks", [6, 9])
def test_activations_fall_by_what_is_saved(blocks: int) -> None:
    """Of what blocks save, nothing is left on the device but that of those at work."""
    tanh, x = ROWS * WIDE * 8, ROWS * WIDTH * 8

    def held(model: Net) -> Any:
        return step_of(model).plan_for(*batch()).explain().memory.ranks[0]

    plain, mine = ([held(way(Net(n))) for n in (blocks, blocks + 3)] for way in (lambda m: m, offloaded))
    weights = (plain[1].parameters - plain[0].parameters) // 3  # of a block
    assert [of.host for of in mine] == [n * tanh + (n - 1) * x for n in (blocks, blocks + 3)]  # one is the caller's
    assert plain[0].host == 0
    growth = [(more.total - more.states - one.total + one.states) / 3 for one, more in (plain, mine)]
    assert growth[0] == weights + tanh + x
    assert growth[1] <= 2 * weights  # and no activations at all: most is live when the last gradients come
    assert plain[0].activations - mine[0].activations >= (blocks - 4) * (tanh + x)


def test_what_goes_into_a_region_is_offloaded() -> None:
    plain, mine = step_of(Net(again=True)), step_of(offloaded(Net(again=True)))
    held, less = (step.plan_for(*batch()).explain().memory.ranks[0] for step in (plain, mine))
    assert less.host == 5 * ROWS * WIDTH * 8  # of six inputs one is the caller's
    assert less.activations <= held.activations
    mine(*batch())
    runs = [do for do in todo(mine) if isinstance(do, Forward) and do.writes[0].kind == "again"]
    assert sum(x.kind == "landed" for do in runs for x in do.reads) == 5


def test_a_limit_of_memory_is_met_by_what_is_offloaded() -> None:
    full = step_of(Net(12)).plan_for(*batch()).explain().memory.ranks[0].total
    assert step_of(Net(12), memory=0.7 * full).plan_for(*batch()).explain().memory.again  # else blocks are run again
    held = step_of(offloaded(Net(12)), memory=0.7 * full).plan_for(*batch()).explain().memory
    assert not held.again
    assert held.ranks[0].total <= 0.7 * full


def test_the_report_tells_bytes_and_seconds() -> None:
    report = step_of(offloaded(Net())).plan_for(*batch()).explain()
    assert report.copying == pytest.approx(report.memory.ranks[0].host / default_cluster("cpu").device.host_bandwidth)
    assert report.waiting == 0  # it is beside what is computed
    cpu = cluster("cpu")
    with flow.use_cluster(replace(cpu, device=replace(cpu.device, host_bandwidth=1e8))):
        slow = step_of(offloaded(Net())).plan_for(*batch()).explain()
    assert slow.waiting == pytest.approx(2 * slow.copying - slow.compute)
    assert slow.predicted == pytest.approx(slow.compute + slow.update + slow.waiting)
    assert "to the host and back" in str(report)
    assert "212 KiB of its memory" in report.html()
    assert "KiB of its memory at most a rank" in str(report)
    assert "offload cpu 1" in step_of(offloaded(Net())).plan_for(*batch()).text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_pipelines_keep_less_and_compute_the_same(schedule: str) -> None:
    found = []
    for to in (None, "cpu", "disk"):
        model = Net()
        flow.nn.place(model.blocks[:3], PIPE.at(pipe=0))
        flow.nn.place(model.blocks[3:], PIPE.at(pipe=1))
        flow.nn.place(model.head, PIPE.at(pipe=1))
        step = step_of(offloaded(model, to), None, micro_batches=4, schedule=schedule)
        losses = [step(*batch()).item() for _ in range(3)]
        found.append((losses, step.explain().memory.ranks[0]))
    (plain, held), (there, less), (files, disk) = found
    assert plain == there == files
    tanh = ROWS // 8 * WIDE * 8
    slots = 4 if schedule == "gpipe" else 2
    assert less.host == disk.disk >= slots * 3 * tanh
    beside_sums = min(slots, 3)  # the first of four has ended when gradients are summed
    assert less.activations <= held.activations - (beside_sums - 1) * 3 * tanh


def test_one_way_back_does_not_hold_for_readers_far_apart() -> None:
    class Skip(Net):
        def forward(self, x: Tensor) -> Tensor:
            first = x = self.blocks[0](x)
            for n, block in enumerate(self.blocks[1:]):
                x = block(x) * first if n == 2 else block(x)
            out: Tensor = self.head(x)
            return out

    model, other = Skip(), Skip()
    step, plain = step_of(offloaded(model, patterns="*")), step_of(other)
    for _ in range(2):
        same(step(*batch()), plain(*batch()), 0)
    fetched = [do.reads[0].of for do in todo(step) if isinstance(do, Fetch)]
    assert max(map(fetched.count, fetched)) == 2  # for the product, and for the second block


def test_what_autograd_keeps_to_itself_is_refused_before_anything_runs() -> None:
    step = step_of(offloaded(Net()), backend="autograd")
    with pytest.raises(SbpError, match=r"saves is to be offloaded, but autograd .*\n.*\n  leave it on the device"):
        step(*batch())


def test_without_a_backward_nothing_is_stowed() -> None:
    model = offloaded(Net())
    step = flow.compile(model, placement=ONE)
    with torch.no_grad():
        same(step(batch()[0]), Net()(batch()[0]))
    assert not [do for do in todo(step) if isinstance(do, Stow)]


def test_registers_on_their_way_have_names_of_their_own() -> None:
    x = LocalRegister("saved", number=3)
    assert LocalRegister("away", x, 3) == "saved 3 away"
    assert LocalRegister("coming", x, 3) == "saved 3 coming 3"
    assert LocalRegister("landed", "y", 1) == "y landed 1"


def on_ranks() -> list[float]:
    losses = []
    for to in ("cpu", "disk"):
        model, one = offloaded(Net(), to), Net()
        flow.nn.offload(model, "*", to=to)
        step, adam = step_of(model, TWO), torch.optim.Adam(one.parameters())
        for _ in range(3):
            losses.append(step(*batch()).item())
            loss_fn(one, *batch()).backward()  # type: ignore[no-untyped-call]
            adam.step()
            adam.zero_grad()
        same_model(model, one)
    return losses


def test_states_and_what_is_saved_on_real_ranks(ranks4: Ranks) -> None:
    losses = ranks4(on_ranks)
    assert losses[0] == losses[1]
