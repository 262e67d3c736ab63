"""Degrees that a plan leaves open: what is found, how near the best of all it is, and what cannot be asked for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.capture.arguments import StepCall
from sbpflow.nn.graph.captures import Captures
from sbpflow.nn.graph.passes import Passes
from sbpflow.nn.plan.check import planned_step, priced_by, words_a_sample
from sbpflow.nn.plan.language.statements import Limit, Pipe
from sbpflow.nn.plan.search.estimates.blocks_again import ALL as ALL_AGAIN
from sbpflow.nn.plan.search.estimates.blocks_again import NONE, BlocksAgain
from sbpflow.nn.plan.search.estimates.degrees import Degrees, Pipeline
from sbpflow.nn.plan.search.estimates.estimate import estimate, layers_of_stages, links_over_data
from sbpflow.nn.plan.search.estimates.shorter_model import LayerKind
from sbpflow.nn.plan.search.estimates.stage_figures import LayerFigures, StageFigures
from sbpflow.nn.plan.search.open_degrees import space_of
from sbpflow.nn.plan.search.planner import FoundPlan
from sbpflow.nn.plan.search.seeking import Seeking
from sbpflow.nn.plan.search.trying import Trying
from sbpflow.sbp import Split
from sbpflow.sbp.logical import Logical

ALL = "seek pipe, data, tensor, micro-batches, schedule, recompute"
WIDTH, WORDS, LENGTH = 512, 1024, 256


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(self.norm(x)).unflatten(-1, (8, -1)).transpose(1, 2)
        query, key, value = packed.chunk(3, -1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(x)))
        return found


class Net(nn.Module):
    """A language model of some layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def made(layers: int = 6, samples: int = 16) -> tuple[Net, Tensor]:
    with torch.device("meta"):
        return Net(layers), torch.zeros(samples, LENGTH, dtype=torch.long)


def found(text: str = ALL, ranks: int = 8, cluster: str = "h100x8*1", **more: object) -> FoundPlan:
    model, tokens = made()
    given: dict[str, object] = {"ranks": ranks, "cluster": cluster, "loss_fn": loss_of, **more}
    return flow.find_plan(model, tokens, plan=text, **given)  # type: ignore[arg-type]


def searching(text: str, model: nn.Module, tokens: Tensor, told: Callable[[str], object] = str) -> Seeking:
    space = space_of(flow.Plan.read(text), model, len(tokens), "cuda", 8, 8)
    return Seeking(space, Trying(model, tokens, loss_of, None, 8, None), told, loss_fn=loss_of, optimizers=[])


def test_what_is_found_says_all_and_reads_back_to_the_same_step() -> None:
    plan = found()
    model, tokens = made()
    again = flow.Plan.read(plan.text).check(model, tokens, cluster="h100x8*1", ranks=8, loss_fn=loss_of)
    assert again.seconds == plan.checked.seconds
    assert again.memory == plan.checked.memory
    assert "seek" not in plan.text.replace("# ", "")
    assert plan.prediction.ranks == 8
    assert all(one.why for one in plan.runners_up)


def test_layers_are_captured_once_for_all_sizes_of_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    capture = Passes.captured

    def counted(self: Passes, call: StepCall, *, watched: bool = False) -> Logical:
        captured.append(self.name)
        return capture(self, call, watched=watched)

    monkeypatch.setattr(Passes, "captured", counted)
    model, tokens = made()
    with priced_by("h100x8*1"):
        seeking = searching(ALL, model, tokens)
        for tensor in (1, 2, 4, 8):
            seeking.add(iter([Degrees(1, 8 // tensor, tensor, 2 * tensor)]))
    assert len(captured) == 1
    assert len({known.memory for known in seeking.found.values()}) == 4


def test_layers_that_cannot_be_planned_tell_nothing_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that looked at them may know less of the model than the one that asks."""
    model, tokens = made()
    with priced_by("h100x8*1"):
        seeking = searching(ALL, model, tokens)
        fresh = searching(ALL, model, tokens).short
        monkeypatch.setattr(fresh, "sample", lambda *args: 1 / 0)
        seeking.add([Degrees(1, 8, 1, 2)])
        other = Degrees(1, 4, 2, 4)
        kind = seeking.short.kind(other)
        seeking.short.ahead.known[kind] = fresh.looked_at(kind)
        seeking.add([other])
    assert [*seeking.found] == [Degrees(1, 8, 1, 2)]
    assert fresh.space.draws
    assert not seeking.space.draws


class Placed(Net):
    """Makes words of its own where the grid is."""

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = super().forward(tokens.to_global(sbp=flow.S(0)))  # type: ignore[attr-defined]
        return found


def test_a_program_that_places_tensors_is_captured_for_each_grid() -> None:
    with torch.device("meta"):
        model, tokens = Placed(6), torch.zeros(16, LENGTH, dtype=torch.long)
    captures = Captures()
    for grid in ("grid cuda (data=8)", "grid cuda (data=4)", "grid cuda (data=8)"):
        planned_step(flow.Plan.read(grid), model, tokens, loss_fn=loss_of, captures=captures)
    assert len(captures.made) == 2


@pytest.mark.sweep
def test_no_choice_is_more_than_three_percent_better() -> None:
    """Of all choices, each planned in full."""
    model, tokens = made()
    with priced_by("h100x8*1"):
        seeking = searching(ALL, model, tokens)
        seeking.run()
        best = seeking.trying.best
        assert best is not None
        space = seeking.space
        every = chain.from_iterable(seeking.variants(at) for at in space.every())
        for at in every:
            for by in space.pipelines(at):
                one = Degrees(at.pipe, at.data, at.tensor, at.micro_batches, by, spread=at.spread)
                other = seeking.trying.add(seeking.candidate(one))
                assert other.checked is None or other.seconds >= 0.97 * best.seconds, one


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "at",
    [
        Degrees(1, 8, 1, 2),
        Degrees(1, 4, 2, 4),
        Degrees(2, 4, 1, 4),
        Degrees(2, 2, 2, 4),
        Degrees(2, 4, 1, 4, Pipeline("interleaved", 3)),
        Degrees(2, 4, 1, 4, Pipeline("zb_h1")),
        Degrees(4, 2, 1, 8),
        Degrees(4, 1, 2, 8),
        Degrees(1, 8, 1, 2, spread=True),
        Degrees(1, 8, 1, 2, again=ALL_AGAIN),
        Degrees(2, 4, 1, 4, again=ALL_AGAIN),
        Degrees(1, 8, 1, 2, again=BlocksAgain(3, 0, 8)),
        Degrees(1, 8, 1, 2, again=BlocksAgain(3, 5, 8)),
        Degrees(2, 4, 1, 4, again=BlocksAgain(0, 6, 8)),
        Degrees(1, 8, 1, 2, host=("states",)),
        Degrees(2, 4, 1, 4, again=ALL_AGAIN, host=("states", "saved")),
        Degrees(8, 1, 1, 16),
        Degrees(1, 2, 4, 8),
    ],
    ids=str,
)
def test_estimates_are_near_what_the_same_plan_takes(at: Degrees) -> None:
    """They set the order alone: of layers as small as these a fifth of seconds, and of bytes as much as what a plan
    has in pieces over `data`, which figures of one rank of `data` do not show."""
    layers = 8
    model, tokens = made(layers)
    with priced_by("h100x8*1"):
        seeking = searching(ALL, model, tokens)
        seeking.add(iter([at]))
        known = seeking.found[at]
        tried = seeking.trying.add(seeking.candidate(at))
    assert tried.checked is not None, tried.why
    assert known.seconds == pytest.approx(tried.checked.seconds, rel=0.2)
    assert known.memory == pytest.approx(tried.checked.memory, rel=0.45)


def figures(seconds: float) -> LayerFigures:
    return LayerFigures(seconds, seconds, seconds, 0.0, 0.0, 0.0, 1, 1, 2, 0, 3, 0, 0, 1)


def test_the_last_stage_has_fewer_layers_where_the_head_takes_as_long_as_some() -> None:
    of = StageFigures(figures(1.0), figures(1.0), figures(3.0))
    assert layers_of_stages(of, 14, 4) == [4, 4, 4, 2]
    assert layers_of_stages(of, 14, 1) == [14]
    assert sum(layers_of_stages(of, 7, 7)) == 7


def test_a_stage_is_what_its_layers_are_and_ends_count_once() -> None:
    of = StageFigures(figures(2.0), figures(1.0), figures(3.0))
    assert of.stage(6, first=True, last=True).forward == 2 + 4 + 3
    assert of.stage(6, first=True, last=False).forward == 2 + 5
    assert of.stage(6, first=False, last=False).kept == 18


def test_micro_batches_beyond_those_that_are_simulated_take_as_long_as_the_slowest_stage() -> None:
    of = StageFigures(figures(1.0), figures(1.0), figures(1.0))
    with priced_by("h100x8"):
        links = links_over_data("cuda")
        few, many = (estimate(of, 8, at, links(at)).seconds for at in (Degrees(4, 1, 1, 8), Degrees(4, 1, 1, 800)))
    assert few == pytest.approx(6 * (8 + 3))  # two layers a stage, each 3 s of a micro-batch
    assert many == pytest.approx(6 * (800 + 3))


def test_what_the_plan_says_stays() -> None:
    plan = found("grid cuda (pipe=2, data=?, tensor=2)\npipe layers over pipe by gpipe, 8 micro-batches")
    pipe = next(line for line in plan.statements if isinstance(line, Pipe))
    assert (pipe.schedule, pipe.micro_batches) == ("gpipe", 8)
    assert "grid cuda (pipe=2, data=2, tensor=2)" in plan.text
    assert "grid cuda (data=8)" in found("grid cuda (data=?)").text
    rows = found("grid cuda (data=?, tensor=2)\nlayers.*.up.weight: tensor=S(0)\nlayers.*.down.weight: tensor=S(1)")
    assert "layers.*.up.weight: tensor=S(0)" in rows.text


def test_an_open_axis_alone_is_looked_for_with_no_other_choice() -> None:
    plan = found("grid cuda (data=?, tensor=?)\n4 micro-batches")
    assert "4 micro-batches" in plan.text
    assert "recompute" not in plan.text


def test_within_a_limit_blocks_run_again_and_nothing_is_found_below_all() -> None:
    whole = found("grid cuda (data=?)\nseek recompute", memory=2**40)
    least = min([whole.checked.memory, *(one.checked.memory for one in whole.runners_up if one.checked)])
    tight = found("grid cuda (data=?)\nseek recompute", memory=0.8 * least)
    assert "recompute layers.[:3] keep mm, attention" in tight.text
    assert tight.checked.memory <= 0.8 * least < whole.checked.memory
    with pytest.raises(flow.SbpError, match="fits into"):
        found(f"{ALL}\n{Limit(2**20)}")


def test_a_model_and_its_optimizer_stay_as_they_are() -> None:
    model, tokens = made()
    before = {name: id(part) for name, part in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = flow.find_plan(
        model, tokens, plan=ALL, cluster="h100x8*1", ranks=8, loss_fn=loss_of, optimizer=optimizer, memory=2**40
    )
    assert {name: id(part) for name, part in model.named_modules()} == before
    assert len(model.layers) == 6
    assert not [key for part in model.modules() for key in part.__dict__ if key.startswith("_sbpflow")]
    assert len(optimizer.param_groups[0]["params"]) == len([*model.parameters()])
    held = plan.checked.report.memory
    assert held is not None
    assert all(of.states == 0 for of in held.ranks.values())  # SGD without momentum keeps none


class Branch(nn.Module):
    """Layers that are unlike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.relu(self.first(x)))
        return found


def test_a_model_without_equal_layers_has_choices_too() -> None:
    with torch.device("meta"):
        model, x = Branch(), torch.empty(64, 64)
    plan = flow.find_plan(
        model, x, plan=ALL, cluster="h100x8*1", ranks=8, loss_fn=lambda model, x: model(x).square().mean()
    )
    assert "pipe" not in plan.text
    assert any("no one list" in one.why for one in plan.runners_up)


def test_as_many_samples_are_looked_at_as_one_stage_may_have() -> None:
    """Several stages of fewer ranks of data could have more."""
    model, tokens = made(samples=128)
    with priced_by("h100x8*1"):
        seeking = searching(ALL, model, tokens)
        seeking.look(1, 1)
        assert seeking.wider(1, 1) == 16
        seeking.limit = 1.0
        assert seeking.wider(1, 1) is None


class Towers(nn.Module):
    """Layers in two lists."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.below, self.above = (nn.ModuleList(Block() for _ in range(layers)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in (*self.below, *self.above):
            x = layer(x)
        found: Tensor = self.head(x)
        return found


@pytest.mark.parametrize("at", [Degrees(1, 8, 1, 2), Degrees(1, 2, 4, 8)], ids=str)
def test_layers_in_two_lists_have_estimates(at: Degrees) -> None:
    with torch.device("meta"):
        model, tokens = Towers(4), torch.zeros(16, LENGTH, dtype=torch.long)
    with priced_by("h100x8*1"):
        seeking = searching(ALL, model, tokens)
        assert (seeking.space.lists, seeking.space.count) == (("below", "above"), 4)
        seeking.add(iter([at]))
        known, tried = seeking.found[at], seeking.trying.add(seeking.candidate(at))
    assert tried.checked is not None, tried.why
    assert known.seconds == pytest.approx(tried.checked.seconds, rel=0.2)
    assert known.memory == pytest.approx(tried.checked.memory, rel=0.08)


class Experts(nn.Module):
    """Eight, each of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(8, WIDTH, 1024)), nn.Parameter(torch.empty(8, 1024, WIDTH))

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        found: Tensor = flow.nn.experts(x, chosen, share, self.up, self.down)
        return found


class Mixture(Block):
    """Attention and experts, of which a token chooses two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 8), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        share, chosen = self.gate(x).softmax(-1).topk(2)
        found: Tensor = x + self.experts(x, chosen, share)
        return found


def mixtures(samples: int = 16) -> tuple[Net, Tensor]:
    """A model of four of these, and its words."""
    model, tokens = made(4, samples)
    with torch.device("meta"):
        model.layers = nn.ModuleList(Mixture() for _ in range(4))
    return model, tokens


def test_experts_may_be_shared_by_ranks_of_data() -> None:
    model, tokens = mixtures()
    at = Degrees(1, 8, 1, 2, expert=8)
    with priced_by("h100x8*1"):
        seeking = searching(f"{ALL}, expert", model, tokens)
        assert (seeking.space.mixtures, seeking.space.experts) == ("**.experts", 8)
        assert at in seeking.variants(Degrees(1, 8, 1, 2))
        assert seeking.space.expert_sizes(Degrees(1, 4, 2, 2)) == [4]  # as many as there are in a node beside tensor
        assert not seeking.space.expert_sizes(Degrees(2, 4, 1, 2))  # four ranks cannot have as many as would do
        seeking.add(iter([at]))
        known, tried = seeking.found[at], seeking.trying.add(seeking.candidate(at))
        few = seeking.short.looked_at(LayerKind(1, 2, NONE, 4, 4)).figures  # half as many samples, captured anew
    assert few is not None
    assert tried.checked is not None, tried.why
    assert "grid cuda (data=8, expert=8 folds data)" in seeking.candidate(at).plan.text
    assert known.seconds == pytest.approx(tried.checked.seconds, rel=0.25)
    assert known.memory == pytest.approx(tried.checked.memory, rel=0.08)


def test_experts_on_every_rank_are_estimated_with_the_tokens_that_ranks_of_data_sort_together() -> None:
    """Beyond a node they are shared, where they can be."""
    model, tokens = mixtures(64)
    at = Degrees(1, 8, 1, 2)
    with priced_by("h100x8*2"):
        space = space_of(flow.Plan.read(f"{ALL}, expert"), model, 64, "cuda", 16, 8)
        seeking = Seeking(space, Trying(model, tokens, loss_of, None, 16, None), str, loss_fn=loss_of, optimizers=[])
        assert [seeking.short.sampled(each) for each in (at, replace(at, data=1), replace(at, expert=4))] == [8, 1, 4]
        assert at in seeking.variants(at)
        assert {each.expert for each in seeking.variants(replace(at, data=16))} == {8}
        assert replace(at, data=16) in searching(ALL, model, tokens).variants(replace(at, data=16))


def test_states_of_few_experts_are_cut_along_another_dim_where_data_has_more_ranks() -> None:
    model, tokens = mixtures(32)
    line = "states **.experts.*: expert=S(0), data=S(1)"
    with priced_by("h100x8*2"):
        space = space_of(flow.Plan.read(f"{ALL}, expert"), model, 32, "cuda", 16, 8)
        seeking = Seeking(space, Trying(model, tokens, loss_of, None, 16, None), str, loss_fn=loss_of, optimizers=[])
        at = Degrees(1, 16, 1, 2, expert=8)
        assert line in space.text(at)
        assert line not in space.text(replace(at, data=8)) + replace(space, experts=32).text(at)
        step = seeking.trying.add(seeking.candidate(at)).step
    assert step is not None
    cut = sum(p.numel() for p in model.parameters()) / 16
    assert all(held.states == pytest.approx(8 * cut, rel=0.01) for held in step.held().values())  # two of 4 bytes


def test_what_cannot_fit_is_not_looked_at_with_blocks_that_run_again() -> None:
    model, tokens = made(6, 64)
    text, at = "grid cuda (data=8)\nseek micro-batches, recompute", Degrees(1, 8, 1, 8)
    with priced_by("h100x8*1"):
        known = searching(text, model, tokens)
        known.add([at])
        least, all_kept = known.estimates.resting(at), known.found[at].memory
        for limit, looks in ((0.9 * least, False), ((least + all_kept) / 2, True)):
            told: list[str] = []
            trying = Trying(model, tokens, loss_of, None, 8, limit)
            Seeking(known.space, trying, told.append, loss_fn=loss_of, optimizers=[]).estimated()
            assert any(line.startswith("a layer") and "run again" in line for line in told) == looks


def test_more_samples_are_looked_at_only_of_what_was_good_with_fewer() -> None:
    model, tokens = mixtures(64)
    shared, other = Degrees(1, 8, 1, 8, expert=8), Degrees(1, 8, 1, 8)
    with priced_by("h100x8*1"):
        seeking = searching(f"{ALL}, expert", model, tokens)
        seeking.add([shared, other])
        of = seeking.found[other]
        wider = Degrees(1, 8, 1, 4)
        for times, good in ((1.0, {1, 8}), (2.0, {1})):
            seeking.found[shared] = replace(of, seconds=times * of.seconds)
            assert {at.expert for at in seeking.variants(wider)} == good


def test_clocks_are_looked_for_in_the_first_capture_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    capture = Passes.captured

    def noted(self: Passes, call: StepCall, *, watched: bool = False) -> Logical:
        seen.append(watched)
        return capture(self, call, watched=watched)

    monkeypatch.setattr(Passes, "captured", noted)
    found("grid cuda (data=8)\nseek micro-batches")
    assert len(seen) > 1
    assert seen == [False] + [True] * (len(seen) - 1)


def test_experts_are_cut_by_tensor_beside_an_axis_of_their_own() -> None:
    model, tokens = mixtures(64)
    at = Degrees(1, 4, 2, 1, expert=4)
    with priced_by("h100x8*1"):
        seeking = searching(f"{ALL}, expert", model, tokens)
        assert at in seeking.variants(Degrees(1, 4, 2, 1))
        text = seeking.candidate(at).plan
        step = planned_step(text, model, tokens, loss_fn=loss_of, ranks=8)
    cut = {s.value.name: s.value.layout for s in step.graph.sources if "experts" in s.value.name}
    assert len(cut) == 8
    for lies in cut.values():
        assert (lies.placement.names, lies.placement.shape) == (("expert", "tensor"), (4, 2))
        assert all(isinstance(entry, Split) for entry in lies.sbp)


def test_words_may_be_shared_where_there_are_many() -> None:
    model, _ = made(4)
    with torch.device("meta"):
        tokens = torch.zeros(4, 2**14, dtype=torch.long)
    text = f"{ALL}, context"
    at = Degrees(1, 4, 1, 1, context=2)
    with priced_by("h100x8*1"):
        short = space_of(flow.Plan.read(text), model, 4, "cuda", 8, 8, 2**12)
        assert short.contexts == [1]
        space = space_of(flow.Plan.read(text), model, 4, "cuda", 8, 8, words_a_sample(tokens))
        assert space.contexts == [1, 2]
        assert at in [*space.every()]
        seeking = Seeking(space, Trying(model, tokens, loss_of, None, 8, None), str, loss_fn=loss_of, optimizers=[])
        seeking.add(iter([at]))
        known, tried = seeking.found[at], seeking.trying.add(seeking.candidate(at))
    assert tried.checked is not None, tried.why
    assert "inside layers.* use ring over context" in seeking.candidate(at).plan.text
    assert known.seconds == pytest.approx(tried.checked.seconds, rel=0.25)
    assert known.memory == pytest.approx(tried.checked.memory, rel=0.08)


def interrupted(at: str) -> Callable[[str], None]:
    """A listener that presses Ctrl-C once, at the first line that begins so."""
    left = [at]

    def told(line: str) -> None:
        if left and line.startswith(left[0]):
            left.pop()
            raise KeyboardInterrupt

    return told


@pytest.mark.parametrize("at", ["a layer with tensor=2", "data=", "pipe="])
def test_who_interrupts_gets_the_best_so_far(at: str) -> None:
    text = ALL if at != "pipe=" else "grid cuda (pipe=2, data=?)\nseek micro-batches"
    assert found(text, told=interrupted(at)).checked.seconds > 0


def test_who_interrupts_before_anything_is_known_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        found(told=interrupted("a layer"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seek pipes", "does not look for pipes"),
        ("grid cuda (data=8)\nseek data", "data=8 is said, and seek asks for data"),
        ("grid cuda (data=?)\nseek tensor", "the grid has no such axis"),
        ("grid cuda (context=2, data=?)", "does not look around an axis context"),
        ("grid cuda (data=?, tensor=3)", "axes of 3 on 8 ranks"),
        ("grid cuda (pipe=2, tensor=2)\nseek recompute", "axes of 4 on 8 ranks"),
        ("grid cuda:[0-7] as (data=8)\nseek recompute", "axes of a placement are said"),
        ("4 micro-batches\nseek micro-batches", "said, and looked for"),
        ("recompute layers.*\nseek recompute", "said, and looked for"),
    ],
)
def test_what_cannot_be_looked_for_is_an_error_that_names_its_line(text: str, said: str) -> None:
    with pytest.raises(flow.SbpError, match=said) as raised:
        found(text)
    assert "line" in str(raised.value)


def test_a_batch_that_nothing_cuts_evenly_is_an_error_that_says_which_would_do() -> None:
    model, tokens = made(samples=5)
    with pytest.raises(flow.SbpError, match=r"a batch of 5 samples .* on 8 ranks\n  give a multiple of 8"):
        flow.find_plan(model, tokens, plan="grid cuda (data=?)", cluster="h100x8*1", ranks=8, loss_fn=loss_of)


class Counted(Net):
    """Layers by a number that is kept beside them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for n in range(6):
            x = self.layers[n](x)
        found: Tensor = self.head(x)
        return found


def test_a_model_that_does_not_run_with_fewer_layers_is_planned_in_full() -> None:
    with torch.device("meta"):
        model, tokens = Counted(6), torch.zeros(16, LENGTH, dtype=torch.long)
    said: list[str] = []
    plan = flow.find_plan(model, tokens, plan=ALL, cluster="h100x8*1", ranks=8, loss_fn=loss_of, told=said.append)
    assert plan.checked.seconds > 0
    assert any(line.startswith("no figures of layers") for line in said)


def test_a_step_does_not_take_what_is_left_open() -> None:
    model, tokens = made()
    for text, said in (("grid (data=?)", "left to the planner"), ("grid (data=2)\nseek recompute", "flow.find_plan")):
        with pytest.raises(flow.SbpError, match=said):
            flow.Plan.read(text).check(model, tokens, ranks=2, loss_fn=loss_of)


@pytest.mark.parametrize("ranks", [8, 64, 1024, 16384])
def test_choices_use_all_ranks_cut_samples_evenly_and_keep_tensors_inside_of_a_node(ranks: int) -> None:
    model, _ = made(12)
    space = space_of(flow.Plan.read(ALL), model, ranks, "cuda", ranks, 8)
    every = [*space.every()]
    assert all(at.pipe * at.data * at.tensor == ranks for at in every)
    assert all(ranks % (at.data * at.micro_batches) == 0 for at in every)
    assert max(at.tensor for at in every) == 8
    assert {at.pipe for at in every} == {1, 2, 4, 8}  # 12 layers
    assert {str(by) for at in every for by in space.pipelines(at)} >= {"1f1b", "interleaved v=3", "zb_h1"}


def test_there_are_no_stages_where_all_fits_in_a_node() -> None:
    assert "pipe" not in found().text


@pytest.mark.sweep
def test_more_ranks_never_take_longer_for_the_same_batch() -> None:
    seconds = [found(ranks=ranks, cluster="h100x8*2").checked.seconds for ranks in (2, 4, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)


def test_choices_that_share_experts_are_as_much_slower_as_one_of_them_was() -> None:
    """Those in stages as another in stages; what shares none stays, and so does what is quicker than was estimated."""
    model, tokens = mixtures()
    shared, other = Degrees(1, 8, 1, 2, expert=8), Degrees(1, 8, 1, 2)
    with priced_by("h100x8*1"):
        seeking = searching(f"{ALL}, expert", model, tokens)
        seeking.add([shared, other])
        before = {at: known.seconds for at, known in seeking.found.items()}
        seeking.tell(replace(shared, pipe=2), 3.0, 3.0, sure=True)
        seeking.tell(shared, 1.0, 1.0, sure=False)
        assert {at: known.seconds for at, known in seeking.found.items()} == before
        seeking.tell(shared, 2.0, 1.0, sure=False)
        again = replace(shared, again=ALL_AGAIN)
        seeking.add([again])
        found = {at: known.seconds for at, known in seeking.found.items()}
        seeking.estimates.told.clear()
        alone = seeking.estimates.of(again)
    assert alone is not None
    assert (found[shared], found[other]) == (2 * before[shared], before[other])
    assert found[again] == 2 * alone.seconds
