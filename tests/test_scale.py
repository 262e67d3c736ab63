"""The published steps that benchmarks/scale asks: every row reads, and its plan is one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import sbpflow as flow
from benchmarks.scale.asked import quickest
from benchmarks.scale.baseline import baselines
from benchmarks.scale.chart import chart
from benchmarks.scale.families import loss_of, made
from benchmarks.scale.hardware import cluster_of
from benchmarks.scale.pairs import named, picked
from benchmarks.scale.plans import plan_of
from benchmarks.scale.refit import PARTS, fitted, left_out, scaled
from benchmarks.scale.report import report
from benchmarks.scale.rows import TABLES, rows
from benchmarks.scale.setting import Architecture, Published, Run
from sbpflow.placement import Cluster

GPUS = {
    "ptdp_table1": [32, 128, 512, 1536, 2520, 64, 256, 1024, 1920, 3072],
    "megascale_table2": [256, 768, 3072, 8192, 512, 1024, 6144, 12288],
    "llama3_405b": [8192, 16384, 16384],
    "torchtitan_202506": [256] * 4 + [64] * 4,
}
MIXTRAL = Architecture("mixtral", 2, 256, 4, 512, 64, 512, 2, experts=8, chosen=2, expert_ffn=512)
DEEPSEEK = Architecture(
    "deepseek", 3, 256, 4, 512, 64, 512, 4, experts=8, chosen=2, expert_ffn=64, shared=1, dense=1, latent=(64, 32)
)
TELL = {"products": 4.0, "attention": 1.0, "other ops": 2.0, "moves": 1.5, "optimizer": 0.5, "other stages": 2.0}


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_settings_whose_plans_can_be_read(table: str) -> None:
    found = rows(table)
    assert found
    for row in {row.run: row for row in found}.values():
        for run in (row.run, *row.others):
            plan = flow.Plan.read(plan_of(row.architecture, run))
            assert str(plan.statements[-1]) == "hold **"
    assert [row.run.gpus for row in found] == GPUS.get(table, [row.run.gpus for row in found])


def test_runs_that_may_have_been_meant_have_the_batch_of_the_row() -> None:
    for table in ("megatron_h100_weak", "llama3_405b"):
        for row in rows(table):
            assert row.others
            assert {(run.batch, run.gpus) for run in row.others} == {(row.run.batch, row.run.gpus)}
            assert len({row.run, *row.others}) == 1 + len(row.others)


def test_rows_read_later_come_behind_the_others() -> None:
    for table in TABLES:
        later = [row.later for row in rows(table)]
        assert later == sorted(later)
    assert sum(row.later for table in TABLES for row in rows(table)) == 40


def test_a_pipeline_of_torchtitan_has_weights_and_gradients_whole() -> None:
    found = [row.run for row in rows("torchtitan_202412") if row.run.pipe > 1]
    assert {(run.zero, run.micro_batches, run.gpus) for run in found} == {(1, 8, 512)}
    assert [run.chunks for run in found] == [1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("family", ["llama", "titan", "even"])
def test_models_that_trainers_write_in_other_words_have_the_same_weights_and_plans(family: Any) -> None:
    of = Architecture(family, 2, 256, 4, 512, 64, 512, 2)
    run = Run("h100", data=2, tensor=2, micro_batches=2, zero=1, sequence=True)
    model, tokens = made(of), torch.empty(run.batch, of.length, dtype=torch.long, device="meta")
    assert sorted(p.shape for p in model.parameters()) == sorted(
        p.shape for p in made(replace(of, family="llama")).parameters()
    )
    checked = flow.Plan.read(plan_of(of, run)).check(
        model, {"tokens": tokens, "targets": tokens}, loss_fn=loss_of, cluster=cluster_of(run), backend="code"
    )
    assert {"reduce_scatter over tensor", "all_gather over tensor"} <= {move.route for move in checked.moves}


def test_as_many_pieces_as_layers_with_words_and_head_are_even_stages() -> None:
    of = Architecture("even", 6, 256, 4, 512, 64, 512, 2)
    run = Run("h100", pipe=4, schedule="interleaved", chunks=2, micro_batches=4)
    tokens = torch.empty(run.batch, of.length, dtype=torch.long, device="meta")
    checked = flow.Plan.read(plan_of(of, run)).check(
        made(of), {"tokens": tokens, "targets": tokens}, loss_fn=loss_of, cluster=cluster_of(run)
    )
    assert checked.report.course is not None
    assert len(checked.report.course.stages) == 4


def test_what_nobody_cuts_along_samples_is_whole_along_tensor() -> None:
    of = Architecture("gpt", 2, 256, 4, 512, 64)
    run = Run("a100", tensor=2, samples=4, again="full")
    tokens = torch.empty(run.batch, of.length, dtype=torch.long, device="meta")
    checked = flow.Plan.read(plan_of(of, run)).check(
        made(of), {"tokens": tokens, "targets": tokens}, loss_fn=loss_of, cluster=cluster_of(run), backend="code"
    )
    forward = {move.route: move.count for move in checked.moves if move.direction == "forward"}
    assert forward["all_reduce over tensor"] >= 4  # two a block


def test_the_quickest_run_that_fits_answers() -> None:
    row = rows("megatron_h100_weak")[0]
    answers: list[Mapping[str, Any]] = [
        {"seconds": at, "fits": fits} for at, fits in ((3.0, True), (1.0, False), (2.0, True))
    ]
    found, answer = quickest(row, answers)
    assert (found.run, answer["seconds"]) == (row.others[1], 2.0)
    assert found.assumed.startswith("4 samples, v=1, the quickest of 2 runs that fit")


def test_where_moves_are_hidden_links_are_quicker_by_what_stays_exposed() -> None:
    run = Run("h100", data=16)
    plain, network, hidden = (cluster_of(replace(run, hides=kind)) for kind in ("", "between nodes", "all"))

    def quicker(than: Cluster) -> list[float]:
        return [of.bandwidth / at.bandwidth for at, of in zip(plain.levels, than.levels, strict=True)]

    assert quicker(hidden) == pytest.approx([1 / 0.40, 1 / 0.23])
    assert quicker(network) == pytest.approx([1, 1 / 0.23])


def test_a_trainer_that_waits_for_python_has_nodes_of_half_the_network() -> None:
    for row in (rows("vtrain_multi")[0], rows("vtrain_single")[0]):
        found, preset = cluster_of(row.run), cluster_of(replace(row.run, hardware="a100"))
        assert found.device.fitted is not None
        assert found.device.fitted.host == 64e-6
        assert [at.bandwidth for at in found.levels[:1]] == [at.bandwidth for at in preset.levels[:1]]
        assert [2 * at.bandwidth for at in found.levels[1:]] == [at.bandwidth for at in preset.levels[1:]]


def test_work_of_a_forward_is_that_of_the_papers() -> None:
    """96 B s L h^2 (1 + s/6h + V/16Lh), with full recomputation: four forwards."""
    for row in rows("ptdp_table1"):
        of, batch = row.architecture, row.run.batch
        s, h, layers = of.length, of.hidden, of.layers
        paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + of.vocabulary / (16 * layers * h))
        assert abs(4 * of.flops * batch / paper - 1) < 0.05


def test_the_baseline_has_as_many_rows_too_quick_as_too_slow() -> None:
    found = rows("zb_table4_throughput")
    slower = sum(seconds > row.seconds for seconds, row in zip(baselines(found), found, strict=True))
    assert abs(slower - len(found) / 2) <= 1


@pytest.mark.parametrize("of", [MIXTRAL, DEEPSEEK], ids=lambda of: of.family)
def test_models_of_experts_are_checked_with_a_plan_that_sends_tokens(of: Architecture) -> None:
    run = Run("h100", data=4, expert=4, zero=1)
    tokens = torch.empty(run.batch, of.length, dtype=torch.long, device="meta")
    batch = {"tokens": tokens, "targets": torch.empty_like(tokens)}
    checked = flow.Plan.read(plan_of(of, run)).check(made(of), batch, loss_fn=loss_of, cluster=cluster_of(run))
    layers = of.layers - of.dense
    sent = [move.count for move in checked.moves if move.route == "all_to_all over expert"]
    assert sent == [2 * layers, 2 * layers]  # forward and backward
    assert checked.seconds > 0


def _published(seconds: float, run: Run, of: Architecture = DEEPSEEK) -> Published:
    return Published("row", of, run, seconds)


def test_a_pair_is_of_one_model_on_as_many_cards_more_than_5_percent_apart() -> None:
    two, four = Run("a100", data=2), Run("a100", data=2, micro_batches=2)
    found = [_published(1.0, two), _published(1.04, two), _published(1.5, two), _published(1.6, four)]
    found += [_published(9.0, Run("a100", data=4)), _published(9.0, two, MIXTRAL)]
    # 1.0 and 1.04 are too near; 1.6 is .8 a sample, quicker than all. Told: 1.5 quicker than 1.0, and as 1.04.
    assert named(found, [1.0, 0.9, 0.9, 1.6, 1.0, 1.0]) == (3, 5)
    assert named(found, [row.seconds for row in found]) == (5, 5)


def test_of_a_group_the_run_told_quickest_is_picked() -> None:
    plans = [
        Run("a100", data=4),
        Run("a100", data=2, tensor=2, micro_batches=2),
        Run("a100", data=2, pipe=2, samples=2),
    ]
    found = [_published(seconds, run) for seconds, run in zip([1.0, 1.1, 1.5, 2.0, 0.9], plans * 2, strict=False)]
    found.append(_published(0.1, Run("a100", data=4, micro_batches=2)))  # another batch
    assert picked(found, [3.0, 2.0, 2.5, 4.0, 3.5, 0.1]) == pytest.approx([1.1 / 0.9 - 1])
    assert picked(found[1:], [2.0, 2.5, 4.0, 3.5, 0.1]) == []  # of four nobody picks


def test_a_fit_finds_the_factors_that_made_its_rows() -> None:
    """Factors of one cost nothing, so that what the rows do not tell stays there."""
    made_by = {**dict.fromkeys(PARTS, 1.0), "products": 1.3}
    parts = [{**TELL, part: 3 * TELL[part]} for part in TELL]
    found = fitted([[(each, scaled(each, made_by)) for each in parts]])
    assert found == pytest.approx(made_by, rel=0.03)


def test_a_table_left_out_is_told_by_the_others_alone() -> None:
    tables = {name: [(TELL, seconds)] for name, seconds in (("a", 11.0), ("b", 22.0), ("c", 22.0))}
    one = left_out(tables)
    assert left_out({**tables, "a": [(TELL, 99.0)]})["a"] == one["a"]
    assert one["a"] == pytest.approx([22.0], rel=0.02)
    assert left_out({"a": tables["a"]}) == {}


def test_waiting_for_other_stages_grows_with_their_computing() -> None:
    twice = scaled(TELL, dict.fromkeys(("products", "attention", "other ops"), 2.0))
    assert twice == 2 * (4 + 1 + 2 + 2) + 1.5 + 0.5
    assert scaled(TELL, {"moves": 2.0}) == sum(TELL.values()) + 1.5


def test_the_report_has_a_line_a_table_and_the_chart_a_mark_a_row() -> None:
    found = rows("korthikanti2022_table5")
    base = {"fits": True, "memory": 1e9, "taken": 1.2e9, "processor": 1.0, "parts": TELL}
    lines = [*report({"korthikanti2022_table5": [(row, {**base, "seconds": row.seconds}) for row in found]})]
    assert "| korthikanti2022_table5 | 4 of 4 | 0.0% | 100% | +0% | 16.4% |  | 2 of 2 |" in lines
    later = [(replace(row, later=True, memory=1.6e9), {**base, "seconds": 1.18 * row.seconds}) for row in found]
    assert "| **all** | 4 | 18.0% | 0% | 100% | +18% | 4 | 37.5% | -38% | +0% |" in [*report({"later": later})]
    picture = chart("korthikanti2022_table5", found, [1.2 * row.seconds for row in found], baselines(found))
    tips = [one.text for one in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert [tip for tip in tips if tip and tip.endswith("+20%")] == tips
    assert len(tips) == len(found)
