"""The actor runtime: schedules, the networks they make, and what runs them."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..placement.moved import missing_of as _missing_of
from .added.addition import Added
from .added.bpipe import bpipe, handed_on
from .added.room import held_at_once, hidden
from .protocol.network import Actor, Give, Network, Register, Take
from .protocol.simulate import Simulation, simulate
from .schedules.chunk_ends import Folding
from .schedules.definition import Shape
from .schedules.pipeline import Costs, network_of
from .schedules.preview import Preview, bubble, peak_bytes, peak_slots
from .schedules.published import PUBLISHED, published
from .schedules.schedule import Schedule
from .schedules.search.order_tasks import FoundOrder, order_tasks
from .schedules.search.pipeline_order import FoundSchedule, curve, search
from .schedules.search.slice_lengths import slice_lengths, sliced_seconds
from .schedules.search.task_graph import After, DeviceTask, TaskGraph
from .timeline import preview_chart as _preview_chart
from .timeline.diagram import draw

if not _TYPE_CHECKING:
    __getattr__ = _missing_of(__name__)

__all__ = [
    "PUBLISHED",
    "Actor",
    "Added",
    "After",
    "Costs",
    "DeviceTask",
    "FoundOrder",
    "FoundSchedule",
    "Folding",
    "Give",
    "Network",
    "Preview",
    "Register",
    "Schedule",
    "Shape",
    "Simulation",
    "Take",
    "TaskGraph",
    "bpipe",
    "bubble",
    "curve",
    "draw",
    "handed_on",
    "held_at_once",
    "hidden",
    "network_of",
    "order_tasks",
    "peak_bytes",
    "peak_slots",
    "published",
    "search",
    "simulate",
    "slice_lengths",
    "sliced_seconds",
]

_preview_chart.install()
