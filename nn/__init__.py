"""nn: models and graphs. Layers that are placed and cut, made global, given values; steps that are captured and run.

tensors <- eager <- model <- graph: each folder imports those before it. explanations tell of a call, graphs of a step.
"""

from .eager import functions as _functions
from .explanations.explanation import CallReport
from .graph import Graph
from .model.annotate import place, shard
from .model.balance import pipeline
from .model.materialise import materialise
from .model.outline import Annotations, annotations
from .model.to_global import to_global

__all__ = [
    "Annotations",
    "CallReport",
    "Graph",
    "annotations",
    "materialise",
    "pipeline",
    "place",
    "shard",
    "to_global",
]

_functions.install()
