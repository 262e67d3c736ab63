"""The actor runtime: schedules, the networks they make, and what runs them."""

from .protocol.network import Actor, Give, Network, Register, Take
from .protocol.simulate import Simulation, simulate
from .schedules.definition import Shape
from .schedules.pipeline import Costs, network_of
from .schedules.preview import Preview, bubble, peak_bytes, peak_slots
from .schedules.published import PUBLISHED, published
from .schedules.schedule import Schedule
from .schedules.search.order_tasks import FoundOrder, order_tasks
from .schedules.search.pipeline_order import FoundSchedule, curve, search
from .schedules.search.task_graph import After, DeviceTask, TaskGraph

__all__ = [
    "PUBLISHED",
    "Actor",
    "After",
    "Costs",
    "FoundSchedule",
    "FoundOrder",
    "Give",
    "Network",
    "Preview",
    "Register",
    "Simulation",
    "Schedule",
    "Shape",
    "Take",
    "DeviceTask",
    "TaskGraph",
    "bubble",
    "curve",
    "network_of",
    "order_tasks",
    "peak_bytes",
    "peak_slots",
    "published",
    "search",
    "simulate",
]
