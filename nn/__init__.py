"""nn: what users write. Global tensors and their factories, modules with global parameters."""

from . import functions as _functions
from .annotate import pipeline, place, shard
from .explain import explain
from .explanation import Explanation
from .explicit import explicit
from .factories import (
    arange,
    empty,
    eye,
    from_local,
    full,
    linspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
)
from .graph import Graph
from .interop import from_dtensor, to_dtensor
from .materialise import materialise
from .modules import to_global
from .outline import Annotations, annotations
from .rules import check_rule, rule
from .tensor import GlobalTensor

__all__ = [
    "Annotations",
    "GlobalTensor",
    "Graph",
    "annotations",
    "arange",
    "check_rule",
    "empty",
    "Explanation",
    "explain",
    "explicit",
    "eye",
    "from_dtensor",
    "from_local",
    "full",
    "linspace",
    "materialise",
    "ones",
    "pipeline",
    "place",
    "rand",
    "randint",
    "randn",
    "randperm",
    "rule",
    "shard",
    "tensor",
    "to_dtensor",
    "to_global",
    "zeros",
]

_functions.install()
