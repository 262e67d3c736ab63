"""nn: what users write. Global tensors and their factories, modules with global parameters."""

from . import functions as _functions
from .annotate import place, shard
from .balance import pipeline
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
from .like_factories import (
    empty_like,
    full_like,
    hann_window,
    logspace,
    normal,
    ones_like,
    rand_like,
    randint_like,
    randn_like,
    zeros_like,
)
from .materialise import materialise
from .modules import to_global
from .outline import Annotations, annotations
from .rules import check_rule, rule
from .tensor import GlobalTensor

__all__ = [
    "Annotations",
    "Explanation",
    "GlobalTensor",
    "Graph",
    "annotations",
    "arange",
    "check_rule",
    "empty",
    "empty_like",
    "explain",
    "explicit",
    "eye",
    "from_dtensor",
    "from_local",
    "full",
    "full_like",
    "hann_window",
    "linspace",
    "logspace",
    "materialise",
    "normal",
    "ones",
    "ones_like",
    "pipeline",
    "place",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "rule",
    "shard",
    "tensor",
    "to_dtensor",
    "to_global",
    "zeros",
    "zeros_like",
]

_functions.install()
