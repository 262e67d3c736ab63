"""sbpflow: write a model as if there were one device, say where its layers live, run it on many."""

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import _interrupt as _interrupt  # before all that takes long
from . import actors, boxing, nn, sbp
from .boxing import box, encoders, record
from .nn import data
from .nn.checkpoint.load import load
from .nn.checkpoint.newest import Saved, newest
from .nn.checkpoint.save import save
from .nn.checkpoint.saving import Saving
from .nn.eager.rules import check_rule, rule
from .nn.explanations.explain import explain
from .nn.explanations.explicit import explicit
from .nn.graph.launches import ahead
from .nn.islands.client import island
from .nn.plan.compiled import compile
from .nn.plan.plan import Plan
from .nn.plan.prediction import Prediction, predict
from .nn.plan.search.planner import find_plan
from .nn.plan.training import Failures
from .nn.refit.addends import addends
from .nn.refit.refit import refit
from .nn.tensors.dtensor import from_dtensor, to_dtensor
from .nn.tensors.factories import (
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
from .nn.tensors.like_factories import (
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
from .nn.tensors.tensor import GlobalTensor
from .nn.watching.watch import watch
from .placement import (
    Cluster,
    DtypeError,
    FileError,
    Jitter,
    MissingError,
    Placement,
    PlacementError,
    SbpError,
    SbpflowError,
    ShapeError,
    TransportError,
    cluster,
    placement,
    use_cluster,
)
from .placement.moved import missing_of as _missing_of
from .placement.world import init
from .sbp import B, Layout, P, S, layout

try:
    __version__ = _version("sbpflow")
except _NotFound:  # run from a checkout that was not installed
    __version__ = "0.1.0"

if not _TYPE_CHECKING:  # types know that a name is not there
    __getattr__ = _missing_of(__name__)

__all__ = [
    "B",
    "Cluster",
    "DtypeError",
    "Failures",
    "FileError",
    "GlobalTensor",
    "Jitter",
    "Layout",
    "MissingError",
    "P",
    "Placement",
    "PlacementError",
    "Plan",
    "Prediction",
    "S",
    "Saved",
    "Saving",
    "SbpError",
    "SbpflowError",
    "ShapeError",
    "TransportError",
    "__version__",
    "actors",
    "addends",
    "ahead",
    "arange",
    "box",
    "boxing",
    "check_rule",
    "cluster",
    "compile",
    "data",
    "empty",
    "empty_like",
    "encoders",
    "explain",
    "explicit",
    "eye",
    "find_plan",
    "from_dtensor",
    "from_local",
    "full",
    "full_like",
    "hann_window",
    "init",
    "island",
    "layout",
    "linspace",
    "load",
    "logspace",
    "newest",
    "nn",
    "normal",
    "ones",
    "ones_like",
    "placement",
    "predict",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "record",
    "refit",
    "rule",
    "save",
    "sbp",
    "tensor",
    "to_dtensor",
    "use_cluster",
    "watch",
    "zeros",
    "zeros_like",
]
