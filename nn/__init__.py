"""nn: what users write. Global tensors and their factories, modules with global parameters."""

from .eager import functions as _functions
from .eager.rules import check_rule, rule
from .explanations.explain import explain
from .explanations.explanation import Explanation
from .explanations.explicit import explicit
from .graph import Graph
from .model.annotate import place, shard
from .model.balance import pipeline
from .model.materialise import materialise
from .model.outline import Annotations, annotations
from .model.to_global import to_global
from .tensors.dtensor import from_dtensor, to_dtensor
from .tensors.factories import (
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
from .tensors.like_factories import (
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
from .tensors.tensor import GlobalTensor

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
