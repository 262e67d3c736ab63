"""PyTorch's own operators on global tensors: right values and gradients, nothing silently wrong, little sent."""

import pytest

from tests.nn.oppool import Results, run

SAMPLE = 10


def sample() -> Results:
    return run(sample=SAMPLE, jobs=1, limit=30)


def test_values_and_gradients_of_a_sample_of_ops_are_those_of_plain_torch() -> None:
    results = sample()
    figures = results.figures
    assert not figures["wrong"], results.report()
    assert figures["forward"] >= 0.96 * figures["ops"], results.report()
    assert figures["both"] >= 0.92 * figures["ops"], results.report()
    assert figures["stays"] >= 0.65 * figures["ops"], results.report()


@pytest.mark.sweep
def test_values_and_gradients_of_all_ops_are_those_of_plain_torch() -> None:
    results = run(jobs=2)
    figures = results.figures
    assert not figures["wrong"], results.report()
    assert figures["forward"] >= 635, results.report()
    assert figures["both"] >= 600, results.report()
    assert figures["stays"] >= 450, results.report()


def test_plain_torch_is_found_right() -> None:
    results = run(["add", "cat", "nn.functional.dropout"], jobs=1, system="plain")
    assert results.figures == {"ops": 3, "forward": 3, "both": 3, "wrong": 0, "stays": 0}, results.report()


def test_values_that_are_off_are_found() -> None:
    results = run(["add", "mm"], jobs=1, system="wrong value")
    assert results.figures == {"ops": 2, "forward": 0, "both": 0, "wrong": 2, "stays": 0}, results.report()


def test_gradients_that_are_off_are_found() -> None:
    results = run(["mm", "nn.functional.mse_loss"], jobs=1, system="wrong gradient")
    assert results.figures == {"ops": 2, "forward": 2, "both": 0, "wrong": 2, "stays": 0}, results.report()


@pytest.mark.parametrize(
    ("system", "limit", "said"), [("dying", 60, "the process died"), ("stuck", 1, "ran longer than")]
)
def test_an_op_that_dies_or_hangs_is_an_error(system: str, limit: int, said: str) -> None:
    results = run(["add"], jobs=1, limit=limit, system=system)
    assert [said in message for message in results["add"].errors] == [True], results.report()
