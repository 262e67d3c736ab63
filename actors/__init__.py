"""The actor runtime: schedules, the networks they make, and what runs them."""

from .network import Actor, Give, Network, Register, Take
from .pipeline import Costs, pipeline
from .published import PUBLISHED, published
from .schedule import Schedule, Shape
from .show import Preview, bubble, peak_bytes, peak_slots
from .simulate import Run, simulate

__all__ = [
    "PUBLISHED",
    "Actor",
    "Costs",
    "Give",
    "Network",
    "Preview",
    "Register",
    "Run",
    "Schedule",
    "Shape",
    "Take",
    "bubble",
    "peak_bytes",
    "peak_slots",
    "pipeline",
    "published",
    "simulate",
]
