"""The demo: its oracle is sharp, its table is whole, and it tells what it cannot draw."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from sbpflow.boxing import demo as demo_module
from sbpflow.boxing.demo import DemoMove, demo, every_boxing, shards_of, summary, table, trial, whole_of
from sbpflow.placement import MissingError, SbpflowError, placement
from sbpflow.sbp import layout

GRID = placement("cpu:[0-3] as (data=2, tensor=2)")


@pytest.fixture(scope="module")
def trials() -> list[DemoMove]:
    return [trial(way) for way in every_boxing(GRID, (4, 6))]


@pytest.mark.parametrize("sbp", [*product(("S(0)", "S(1)", "B", "P"), repeat=2)], ids="-".join)
@pytest.mark.parametrize("shape", [(4, 6), (3, 1), (0, 2)], ids=str)
def test_shards_cut_without_boxing_amount_to_the_whole(sbp: tuple[str, str], shape: tuple[int, int]) -> None:
    whole = torch.randint(-8, 8, shape).float()
    how = layout(GRID, sbp, shape)
    found = whole_of(shards_of(whole, how, torch.Generator().manual_seed(1)), how)
    assert found is not None
    assert torch.equal(found, whole)


def test_replicas_that_differ_and_shards_of_a_wrong_shape_are_no_whole() -> None:
    how = layout(GRID, "(S(0), B)", (4,))
    shards = [torch.zeros(2) for _ in range(4)]
    assert whole_of(shards, how) is not None
    assert whole_of([*shards[:3], torch.ones(2)], how) is None
    assert whole_of([*shards[:3], torch.zeros(3)], how) is None


def test_every_pair_is_made_and_right(trials: list[DemoMove]) -> None:
    assert len({(one.boxing.src, one.boxing.dst) for one in trials}) == 256
    assert all(one.right for one in trials)
    assert all(one.sent == one.boxing.total for one in trials)
    assert not any(one.sent for one in trials if not one.bound)


def test_every_pair_is_in_the_table_in_100_columns(trials: list[DemoMove]) -> None:
    lines = table(trials).splitlines()
    assert max(map(len, lines)) <= 100
    groups = [k for k, line in enumerate(lines) if "->" in line]
    assert len(groups) == 16
    for first, after in pairwise([*groups, len(lines) + 1]):
        targets = [line[:15].strip() for line in lines[first + 1 : after - 1]]
        assert targets == list(dict.fromkeys(one.boxing.dst.lie for one in trials))


def test_a_wrong_value_shows(trials: list[DemoMove]) -> None:
    broken = [trials[0]._replace(right=False), *trials[1:]]
    assert table(broken).count("WRONG VALUE") == 1
    assert summary(broken, trials).startswith("256 pairs: 255 values right; 256 of 256")


def test_the_demo_writes_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    demo(tmp_path / "out")
    said = capsys.readouterr().out
    assert "256 pairs: 256 values right" in said
    assert (tmp_path / "out" / "moves.svg").exists()
    assert said.count(str(tmp_path)) >= 3
    assert torch.get_num_threads() == threads


def test_the_demo_succeeds_where_nothing_can_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cannot(text: str, path: Path) -> Path:
        raise MissingError(f"cannot draw {path.name}")

    monkeypatch.setattr(demo_module, "picture", cannot)
    monkeypatch.setattr(demo_module, "SHAPE", (8, 8))
    demo(tmp_path)
    assert "cannot draw boxing.svg\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["moves.svg"]


def test_the_demo_fails_on_a_wrong_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "SHAPE", (8, 8))
    monkeypatch.setattr(demo_module, "whole_of", lambda shards, how: None)
    with pytest.raises(SbpflowError, match="512 moves gave wrong values"):
        demo(tmp_path)
