"""nn: what users write. Global tensors and their factories, modules with global parameters."""

from . import functions as _functions
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
from .interop import from_dtensor, to_dtensor
from .modules import to_global
from .rules import check_rule, rule
from .tensor import GlobalTensor

__all__ = [
    "GlobalTensor",
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
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "rule",
    "tensor",
    "to_dtensor",
    "to_global",
    "zeros",
]

_functions.install()
