"""The actor runtime: schedules, the networks they make, and what runs them."""

from .protocol.network import Actor, Give, Network, Register, Take
from .protocol.simulate import Simulation, simulate
from .schedules.definition import Shape
from .schedules.pipeline import Costs, network_of
from .schedules.preview import Preview, bubble, peak_bytes, peak_slots
from .schedules.published import PUBLISHED, published
from .schedules.schedule import Schedule

__all__ = [
    "PUBLISHED",
    "Actor",
    "Costs",
    "Give",
    "Network",
    "Preview",
    "Register",
    "Simulation",
    "Schedule",
    "Shape",
    "Take",
    "bubble",
    "network_of",
    "peak_bytes",
    "peak_slots",
    "published",
    "simulate",
]
