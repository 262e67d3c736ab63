"""nn: what users write. Global tensors and their factories, modules with global parameters."""

from . import functions as _functions
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
from .modules import to_global
from .moving import explicit
from .rules import check_rule, rule
from .tensor import GlobalTensor

__all__ = [
    "GlobalTensor",
    "arange",
    "check_rule",
    "empty",
    "explicit",
    "eye",
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
    "to_global",
    "zeros",
]

_functions.install()
