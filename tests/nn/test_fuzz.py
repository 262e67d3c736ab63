"""Random programs give on global tensors, of whatever layout, the values and gradients that they give on one."""

import pytest

from tests.nn.fuzz import Leaf, Program, differs, draw, shrink

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of deviations of one number, transposed vectors, ...


def report(seed: int) -> str:
    """The difference that a program shows, and the least code that shows it."""
    program = draw(seed)
    if not differs(program):
        return ""
    least = shrink(program)
    return f"program {seed}: {differs(least)}\n\n{least.code()}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tens", range(15))
def test_random_programs_give_what_one_tensor_gives(tens: int) -> None:
    found = [report(seed) for seed in range(10 * tens, 10 * tens + 10)]
    assert not any(found), "\n".join(found)


def test_a_hook_on_a_part_of_what_was_written_to_since_does_not_crash() -> None:
    lines = ("y1 = x0 * 1", "y2 = y1[..., 0]; y1.mul_(0.5)", "y2.register_hook(lambda g: g * 2)")
    assert not differs(Program((2,), (Leaf((4, 6), ("S(0)",)),), lines))  # cut down from program 635


@pytest.mark.sweep
@pytest.mark.parametrize("hundreds", range(2, 15))
def test_thousands_of_random_programs_give_what_one_tensor_gives(hundreds: int) -> None:
    found: list[str] = []
    for seed in range(100 * hundreds, 100 * hundreds + 100):
        found += [text for text in (report(seed),) if text]
        if len(found) == 3:
            break
    assert not found, "\n".join(found)
