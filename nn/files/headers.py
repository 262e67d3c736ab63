"""Headers: what the safetensors files of a path hold, or an error that tells why they cannot be read.

Nothing but headers is read here. Pickles are refused: reading one runs whatever code is in it.
"""

import json
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from ...placement.errors import DtypeError, FileError, MissingError, did_you_mean, some_of
from .values import FileTensor

__all__ = ["DTYPES", "NAMES", "file_tensors", "opened"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
ONE, INDEX = "model.safetensors", ".safetensors.index.json"  # as transformers names them
SAVE = "save the weights anew: model.save_pretrained(folder), or safetensors.torch.save_file(model.state_dict(), file)"


def file_tensors(path: str | PathLike[str]) -> dict[str, FileTensor]:
    """All tensors of a file *.safetensors, or of a folder with one or with shards and their index, by their names."""
    given = Path(fspath(path)).absolute()
    if given.is_dir():
        given = _in_folder(given)
    if not given.exists():
        raise _not_there(given)
    if given.name.endswith(INDEX):
        return _of_shards(given)
    if given.suffix in PICKLES:
        raise FileError(
            f"flow.load: {given} is a pickle, and no pickle is read: it runs whatever code is in it\n"
            f"  found the suffix {given.suffix}; read are *.safetensors, and folders with them\n  {SAVE}"
        )
    if given.suffix != ".safetensors":
        raise FileError(f"flow.load: {given} is no file *.safetensors, nor a folder with one\n  {SAVE}")
    return _held(given)


def opened(file: str | Path) -> Any:
    """A safetensors file, open: a context manager that closes it. Where it is none, or torn, that is the error."""
    try:
        safetensors = import_module("safetensors")
    except ImportError:
        raise MissingError("flow.load reads by safetensors, which is not here\n  pip install 'sbpflow[load]'") from None
    try:
        return safetensors.safe_open(str(file), framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        size = Path(file).stat().st_size if Path(file).exists() else 0
        raise FileError(
            f"flow.load: {file} cannot be read: {error}\n"
            f"  it has {size} bytes, which are no whole safetensors file\n  download or save it again"
        ) from error


def _held(file: Path) -> dict[str, FileTensor]:
    found = {}
    with opened(file) as handle:
        for name in handle.keys():  # noqa: SIM118 no dict
            part = handle.get_slice(name)
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                raise DtypeError(
                    f"flow.load: {name} in {file} is of {part.get_dtype()}, which torch has no tensors of\n"
                    f"  read are {', '.join(DTYPES)}"
                )
            found[name] = FileTensor(str(file), name, tuple(part.get_shape()), dtype)
    return found


def _in_folder(folder: Path) -> Path:
    """The file of a folder that transformers would read."""
    names = sorted(path.name for path in folder.iterdir())
    indices = [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if ONE in names:
        return folder / ONE
    if len(indices) == 1:
        return folder / indices[0]
    if len(files) == 1 and not indices:
        return folder / files[0]
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    if indices or files:
        what, fix = f"several: {some_of(indices or files)}", f"pass one of them: {folder / (indices or files)[0]}"
    elif pickles:
        what, fix = f"{some_of(pickles)}, and no pickle is read: it runs whatever code is in it", SAVE
    else:
        what, fix = some_of(names) or "nothing", SAVE
    raise FileError(f"flow.load: the folder {folder} has no {ONE}, nor one *{INDEX}\n  it has {what}\n  {fix}")


def _of_shards(index: Path) -> dict[str, FileTensor]:
    shards: dict[str, str] = {}
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(shards.values()))
        missing = [file for file in files if not (index.parent / file).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(
            f"flow.load: {index} is no index of shards\n"
            f"  found {type(error).__name__}: {error}; expected {{'weight_map': {{name: file}}}}\n"
            "  download or save it again"
        ) from error
    if missing:
        raise FileError(
            f"flow.load: {some_of(missing)} of {len(files)} shards {'is' if len(missing) == 1 else 'are'} missing\n"
            f"  {index.name} names them, and {index.parent} has not\n  download or copy all of the folder"
        )
    found: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in _held(index.parent / file).items():
            if shards.get(name, file) != file or name in found:
                continue  # the index says that another shard has it
            found[name] = tensor
    lost = [name for name, file in shards.items() if name not in found or found[name].file != str(index.parent / file)]
    if lost:
        raise FileError(
            f"flow.load: {index.name} says that {shards[lost[0]]} holds {lost[0]}, and it does not\n"
            f"  there are {len(lost)} such names\n  download or save all of the folder again"
        )
    return found


def _not_there(path: Path) -> FileError:
    around = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    found = f"{path.parent} has {some_of(around) or 'nothing'}" if path.parent.is_dir() else f"nor is {path.parent}"
    hub = "a model of the hub is first brought here: huggingface_hub.snapshot_download(name) returns its folder"
    return FileError(f"flow.load: {path} is not there\n  {found}\n  {did_you_mean(path.name, around, hub)}")
