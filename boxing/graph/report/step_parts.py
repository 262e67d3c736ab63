"""Parts of a step's seconds, by what they are spent on, and the bar of them, as text and as a picture.

    ###########################@@@@@@++++++====uu......
    # products 58 %, @ attention 11 %, + other ops 12 %, = moves 8 %, u optimizer 2 %, . other stages 9 %

They add up to the step. Of a pipeline they are those of a stage in the mean, and what is left is waiting for others.
"""

from collections.abc import Mapping
from statistics import mean
from typing import NamedTuple

from ....sbp.kernels.flops import ATTENTION, PRODUCTS
from .facts import GraphFacts, priced_ops

__all__ = ["LOOKS", "bar", "step_parts"]


class PartLook(NamedTuple):
    """The sign of a part in text, and its colour in pictures, which is seen on white and on near black."""

    sign: str
    fill: str


LOOKS = {
    "products": PartLook("#", "#4c8fdd"),
    "attention": PartLook("@", "#9a6fe0"),
    "other ops": PartLook("+", "#3fae83"),
    "moves": PartLook("=", "#e08a3c"),
    "optimizer": PartLook("u", "#c7a93a"),
    "the host": PartLook("h", "#d86f98"),
    "other stages": PartLook(".", "#9aa4ae"),
    "the slowest": PartLook("~", "#b0574f"),  # waiting for it, where devices compute unevenly
}


def step_parts(facts: GraphFacts) -> dict[str, float]:
    """Seconds of a step by part, without those that it has none of; empty where its seconds are not known."""
    step = facts.predicted
    if step is None or facts.compute is None:
        return {}
    found = dict.fromkeys(LOOKS, 0.0)
    for op, cost in priced_ops(facts.graph, facts.costs):
        name = op.op._schema.name
        if cost and name in ATTENTION | PRODUCTS:
            found["attention" if name in ATTENTION else "products"] += cost.seconds
    found["other ops"] = facts.compute - sum(found.values())
    course = facts.course
    if course is None:
        found |= {"optimizer": facts.update, "the host": facts.waiting + facts.launching}
        found["moves"] = step - sum(found.values())
    else:
        busy = mean(seconds for _, seconds in course.stages)
        share = min(course.micro_batches / len(course.stages), busy / facts.compute) if facts.compute else 0.0
        found = {part: seconds * share for part, seconds in found.items()}
        rest = max(0.0, busy - share * facts.compute)
        found["the host"] = min(share * facts.launching, rest)
        once = facts.update + facts.once
        found["optimizer"] = course.once * facts.update / once if once else 0.0
        found["moves"] = rest - found["the host"] + course.once - found["optimizer"] + facts.whole
        found["other stages"] = step - sum(found.values())
    return {part: seconds for part, seconds in found.items() if seconds > 1e-9 * step}


def bar(parts: Mapping[str, float], width: int = 72) -> list[str]:
    """A bar of so many signs, and what each of them stands for.

    >>> print("\\n".join(bar({"products": 3.0, "moves": 1.0}, 8)))
    ######==
    # products 75 %, = moves 25 %
    """
    whole, drawn, line = sum(parts.values()), 0.0, ""
    for part, seconds in parts.items():
        drawn += seconds
        line += LOOKS[part].sign * (round(width * drawn / whole) - len(line))
    shares = (f"{LOOKS[part].sign} {part} {_percent(seconds / whole)}" for part, seconds in parts.items())
    return [line, ", ".join(shares)]


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.01 else f"{share * 100:.1g} %"
