"""sbpflow: write a model as if there were one device, say where its layers live, run it on many."""

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version

from . import actors, boxing, nn, sbp
from .actors import Schedule
from .boxing import box, box_async, gather, layout_of, lower_bound, plan, record, scatter
from .nn import (
    GlobalTensor,
    arange,
    check_rule,
    empty,
    empty_like,
    explain,
    explicit,
    eye,
    from_dtensor,
    from_local,
    full,
    full_like,
    hann_window,
    linspace,
    logspace,
    normal,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    randperm,
    rule,
    to_dtensor,
    zeros,
    zeros_like,
)
from .nn.graph import Graph, compile
from .nn.tensors.factories import tensor  # not by way of nn, where type checkers see the module of that name
from .placement import Cluster, Placement, SbpflowError, cluster, placement, use_cluster
from .placement.world import close, init, owned
from .sbp import B, Layout, P, S, layout

try:
    __version__ = _version("sbpflow")
except _NotFound:  # run from a checkout that was not installed
    __version__ = "0.1.0"

__all__ = [
    "B",
    "Cluster",
    "GlobalTensor",
    "Graph",
    "Layout",
    "P",
    "Placement",
    "S",
    "SbpflowError",
    "Schedule",
    "__version__",
    "actors",
    "arange",
    "box",
    "box_async",
    "boxing",
    "check_rule",
    "close",
    "cluster",
    "compile",
    "empty",
    "empty_like",
    "explain",
    "explicit",
    "eye",
    "from_dtensor",
    "from_local",
    "full",
    "full_like",
    "gather",
    "hann_window",
    "init",
    "layout",
    "layout_of",
    "linspace",
    "logspace",
    "lower_bound",
    "nn",
    "normal",
    "ones",
    "ones_like",
    "owned",
    "placement",
    "plan",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "record",
    "rule",
    "sbp",
    "scatter",
    "tensor",
    "to_dtensor",
    "use_cluster",
    "zeros",
    "zeros_like",
]
