"""Placements of tensors, the clusters that price them, and every error of the package."""

from .cluster import Cluster, cluster, default_cluster, use_cluster
from .errors import (
    DtypeError,
    FileError,
    MissingError,
    PlacementError,
    SbpError,
    SbpflowError,
    ShapeError,
    TransportError,
    caret,
)
from .grid import Placement, placement
from .hardware import Calibration, Device, Jitter, Level, MoveShares, RankDevice, RankLink

__all__ = [
    "Calibration",
    "Cluster",
    "Device",
    "DtypeError",
    "FileError",
    "Jitter",
    "Level",
    "MissingError",
    "Placement",
    "PlacementError",
    "RankDevice",
    "RankLink",
    "SbpError",
    "SbpflowError",
    "ShapeError",
    "MoveShares",
    "TransportError",
    "caret",
    "cluster",
    "default_cluster",
    "placement",
    "use_cluster",
]
