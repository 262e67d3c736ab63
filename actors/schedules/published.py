"""The published schedules, each a few marks. docs/reference/schedules.md shows what they do."""

from ...placement.errors import ScheduleError, did_you_mean
from .schedule import Schedule

__all__ = ["PUBLISHED", "published"]

_TABLE = (
    Schedule("gpipe"),
    Schedule("gpipe_lifo", lifo=True),
    Schedule("1f1b", act="p-s", low_b="p-s-1"),
    Schedule("eager_1f1b", act="2*(p-s)-1"),
    Schedule("interleaved", v=2, act="m", group="p", pool="2*(p-s-1)+(v-1)*p+1"),
    Schedule("breadth_first", v=2, act="m"),
    Schedule("zb_h1", split=True, act="p-s", stash="p", dy="s+1", low_b="p-s-1", low_w="s"),
    Schedule("zb_h2", split=True, act="2*(p-s)-1", stash="2*p-1", dy="2*s+1", low_b="2*(p-s)-2", low_w="2*s"),
    Schedule("zb_v", way="vee", v=2, split=True, order="zb_v"),
    Schedule("v_half", way="vee", v=2, split=True, order="v_half"),
    Schedule("v_min", way="vee", v=2, split=True, order="v_min"),
    Schedule("chimera", way="routes", v=2, act="min(p//2, p-s)", first="BFW", deep=True, unit="p"),
    # Not of the paper: without its unit, which has the slots of early micro-batches wait for late ones; and with all
    # the slots that a route can use, which is one more on a device than 1F1B's first has.
    Schedule("chimera_free", way="routes", v=2, act="min(p//2, p-s)", deep=True),
    Schedule("chimera_full", way="routes", v=2, act="p-s", deep=True),
    Schedule("dualpipe", way="routes", v=2, split=True, order="dualpipe"),
    Schedule("dualpipe_v", way="vee", v=2, split=True, order="dualpipe_v"),
    Schedule("gems", way="routes", v=2, act="1", first="BFW", turns=True),
    Schedule("terapipe", act="p-s-1+n", slices=True),
    Schedule("pipedream", act="p-s", low_b="p-s-1", versions="p-s"),
    Schedule("2bw", act="p-s", low_b="p-s-1", versions="2", update="max(p-1, 1)"),
    # The paper has 2(p-s)-1 updates between F and B of stage s.
    Schedule("pipemare", act="2*(p-s)", low_b="2*(p-s)-1", versions="1", unpinned="newest"),
    Schedule("pipemare_corrected", act="2*(p-s)", low_b="2*(p-s)-1", versions="1", unpinned="corrected"),
)

# Names under which papers know the same schedule.
_ALSO = {
    "pipedream_flush": "1f1b",
    "dapple": "1f1b",
    "bfpp": "breadth_first",
    "seq1f1b": "terapipe",
    "pipedream_2bw": "2bw",
}

PUBLISHED = {schedule.name: schedule for schedule in _TABLE}


def published(name: str) -> Schedule:
    """A published schedule by its name."""
    found = PUBLISHED.get(_ALSO.get(name, name))
    if found is None:
        raise ScheduleError(f"no schedule is called {name!r}\n  {did_you_mean(name, [*PUBLISHED, *_ALSO])}")
    return found
