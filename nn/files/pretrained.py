"""`save_pretrained` of transformers on global models: its own code decides on names, conversions and files, and all
processes write these together.

    every process    runs save_pretrained, which asks for files and is told to wait; but the first in a folder aside
    together         write each of the files, every process the elements that it has

transformers gathers what it knows to be sharded on one process. It does not know global tensors, so nothing is.
"""

import sys
from collections.abc import Mapping
from functools import wraps
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ...placement.world import world
from ..model.replacement import BEFORE_GLOBAL
from ..tensors.tensor import GlobalTensor
from .joint_file import put_off, ranks_that_write, save_file, stand_ins

__all__ = ["install"]

_taught = False


def teach_transformers() -> None:
    """Have models of transformers, if there are any, save global parameters."""
    global _taught
    theirs = sys.modules.get("transformers.modeling_utils")
    if _taught or theirs is None or not hasattr(theirs, "PreTrainedModel"):
        return
    _taught = True
    base = theirs.PreTrainedModel
    plain, order = base.save_pretrained, signature(base.save_pretrained)

    @wraps(plain)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = order.bind(self, *args, **kwargs).arguments
        state = call.get("state_dict") or self.state_dict()
        if not any(isinstance(x, GlobalTensor) for x in state.values()):
            return plain(self, *args, **kwargs)
        _refuse(call)
        return _save(plain, self, call, _untied(theirs, self, state))

    base.save_pretrained = save_pretrained


def install() -> None:
    """Have that be so from the first global parameter on."""
    BEFORE_GLOBAL.append(teach_transformers)


def _refuse(call: Mapping[str, Any]) -> None:
    for name, instead in (
        ("push_to_hub", "save first, then huggingface_hub.upload_folder(folder_path=..., repo_id=...) on one process"),
        ("distributed_checkpoint", "flow.save(path, model, ...) writes what a run resumes from"),
    ):
        if call.get(name):
            raise SbpError(f"save_pretrained of a global model does not take {name}=True\n  {instead}")


def _untied(theirs: Any, model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which tied weights are once, under the name that transformers wants."""
    kept = theirs.remove_tied_weights_from_state_dict(stand_ins(state), model)
    return {name: state[name] for name in kept}


def _save(plain: Any, model: Any, call: Mapping[str, Any], state: dict[str, Tensor]) -> Any:
    folder, ranks = Path(call["save_directory"]).absolute(), ranks_that_write(state.values())
    first = ranks is None or world().rank == ranks.flat[0]
    ours = "self", "save_directory", "is_main_process", "state_dict", "kwargs"
    more = {name: value for name, value in call.items() if name not in ours} | call.get("kwargs", {})
    vars(model)["should_save_on_this_rank"] = lambda is_main_process: True
    try:
        with TemporaryDirectory() as aside, put_off() as asked, torch.no_grad():
            result = plain(model, str(folder) if first else aside, True, state, **more)
    finally:
        del vars(model)["should_save_on_this_rank"]
    for path, (tensors, metadata) in asked.items():
        save_file(tensors, folder / Path(path).name, metadata)
    return result
