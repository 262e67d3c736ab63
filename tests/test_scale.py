"""The published steps that benchmarks/scale asks: every row reads, and its plan is one."""

import pytest

import sbpflow as flow
from benchmarks.scale.baseline import baselines
from benchmarks.scale.plans import plan_of
from benchmarks.scale.rows import TABLES, rows

GPUS = {"ptdp_table1": [32, 128, 512, 1536, 2520], "megascale_table2": [256, 768, 3072, 8192], "llama3_405b": [8192]}


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_settings_whose_plans_can_be_read(table: str) -> None:
    found = rows(table)
    assert found
    for row in {row.run: row for row in found}.values():
        plan = flow.Plan.read(plan_of(row.architecture, row.run))
        assert str(plan.statements[-1]) == "hold **"
    assert [row.run.gpus for row in found] == GPUS.get(table, [row.run.gpus for row in found])


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
