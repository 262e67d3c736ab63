"""nn: models and graphs. Layers that are placed and cut, made global, given values; steps that are captured and run.

tensors <- eager, files <- model <- graph <- checkpoint: each folder imports those before it. explanations tell
of a call, graphs of a step.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..placement.moved import missing_of as _missing_of
from .asynchronous.delayed_rate import DelayedLR
from .asynchronous.lock_free import LockFreeRun, hogwild
from .asynchronous.meetings import meet
from .asynchronous.parameter_server import ParameterServer
from .asynchronous.servers import to_servers
from .composites.axis import Axis, AxisValue
from .composites.registry import composite
from .eager import functions as _functions
from .eager_parts.marks import eager
from .explanations.explanation import CallReport
from .explanations.graph import Graph
from .files import joint_file as _joint_file
from .files import pretrained as _pretrained
from .files import torch_protocol as _torch_protocol
from .generation.generation import Generation, generation
from .graph.choose.stage_split import LayerLoad, StageSplit, split_stages
from .graph.frozen_cache import FrozenCache
from .graph.optimizer import clipping as _clipping
from .graph.optimizer.kept_errors import StepErrors
from .mixtures.expert_ops import experts
from .model.annotate import place, shard
from .model.balance import pipeline
from .model.cast import cast
from .model.compress import compress
from .model.flows import flow
from .model.inside import inside
from .model.offload import offload
from .model.outline import Annotations, annotations
from .model.reading import reading
from .model.recompute.recomputation import recompute
from .model.to_global import to_global
from .model.values.materialise import materialise
from .owners.kinds import steps_by_tensor

if not _TYPE_CHECKING:
    __getattr__ = _missing_of(__name__)

__all__ = [
    "Annotations",
    "Axis",
    "AxisValue",
    "CallReport",
    "DelayedLR",
    "FrozenCache",
    "Generation",
    "Graph",
    "LayerLoad",
    "StageSplit",
    "LockFreeRun",
    "ParameterServer",
    "StepErrors",
    "annotations",
    "cast",
    "compress",
    "composite",
    "eager",
    "experts",
    "flow",
    "generation",
    "hogwild",
    "inside",
    "materialise",
    "meet",
    "offload",
    "pipeline",
    "place",
    "reading",
    "recompute",
    "shard",
    "split_stages",
    "steps_by_tensor",
    "to_global",
    "to_servers",
]

_functions.install()
_clipping.install()
_torch_protocol.install()
_joint_file.install()
_pretrained.install()
