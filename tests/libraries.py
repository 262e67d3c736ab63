"""Libraries of models beside transformers, as tests import them: timm, diffusers, torchvision.

They lie in a folder of their own (`libraries` beside the interpreter's `bin`, see tools/setup_env.py), which only these
tests look into: a torchvision that was built for another build of torch ends every import of transformers.
"""

# mypy: disallow-untyped-calls=False

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["library"]

FOLDER = Path(sys.prefix) / "libraries"
PACKAGES = {"torchvision", "timm", "diffusers"}
SCHEMAS: Mapping[str, str] = {  # of the ops that torchvision describes while it is imported, whether it has them or not
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
kept: list[torch.library.Library] = []  # what is defined goes with its Library


def library(name: str) -> Any:
    """The package of this name; a test that wants one that is not installed is skipped."""
    if name in PACKAGES and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # the last: what is installed for all goes first
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: run tools/setup_env.py")
    if name in PACKAGES:
        know_ops_of_torchvision()
    return importlib.import_module(name)


def know_ops_of_torchvision() -> None:
    """Define the ops that torchvision describes at import, if its own part in C++ does not load beside this torch."""
    found = importlib.util.find_spec("torchvision")
    if found is None or kept or "torchvision" in sys.modules:
        return
    (folder,) = found.submodule_search_locations or ["."]
    try:
        for part in Path(folder).glob("_C*.so"):
            torch.ops.load_library(part)
    except OSError:  # such as one for CUDA beside a torch for CPUs
        kept.append(torch.library.Library("torchvision", "DEF"))
        for schema in SCHEMAS.values():
            kept[0].define(schema)
