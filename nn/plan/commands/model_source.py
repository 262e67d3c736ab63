"""Models by name, for the command line: of a module's function, of a class of transformers, of a config file.

    mine.py:build            build() returns a model, or a model and a batch, or these and a loss function
    mypackage.models:build   the same of a module
    LlamaForCausalLM         with the sizes that its config has of itself
    llama/config.json        of what transformers saved

They are made on meta: no weights are read or drawn.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ....placement.errors import MissingError, SbpError, did_you_mean, some_of

__all__ = ["NamedModel", "model_called"]


@dataclass(frozen=True, eq=False)
class NamedModel:
    """A model with a batch to plan for; without a loss function it is the model's own."""

    name: str
    model: nn.Module
    batch: Any
    loss_fn: Callable[..., Any] | None = None


def model_called(name: str, samples: int, tokens: int) -> NamedModel:
    """The model that a user means, and if nothing else is said a batch of so many samples and tokens."""
    with torch.device("meta"):
        if ":" in name and not Path(name).exists():
            return _made(name, samples, tokens)
        return _of_transformers(name, samples, tokens)


def _made(name: str, samples: int, tokens: int) -> NamedModel:
    """The model that a function of a module or a file makes."""
    where, _, function = name.rpartition(":")
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    make = getattr(module, function, None)
    if not callable(make):
        known = _makers(module)
        has = f"it has {some_of(known, 8)}" if known else "write one that returns the model"
        raise SbpError(f"{where} has no function called {function!r}\n  {did_you_mean(function, known, has)}")
    made = make()
    model, *more = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"{name} returns {type(model).__name__}\n"
            "  have it return an nn.Module, or (model, batch), or (model, batch, loss_fn)"
        )
    batch = more[0] if more else _words(model, samples, tokens)
    return NamedModel(type(model).__name__, model, batch, more[1] if len(more) > 1 else None)


def _makers(module: ModuleType) -> list[str]:
    """Names of what may make a model: the functions of a module that are its own, and then its classes."""
    made = {name: each for name, each in vars(module).items() if callable(each) and not name.startswith("_")}
    own = [name for name, each in made.items() if getattr(each, "__module__", None) == module.__name__]
    return sorted(own, key=lambda name: isinstance(made[name], type))


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name):  # it is there, and imports what is not
            raise
        raise SbpError(
            f"cannot import {name!r}: {error}\n  write package.module:function, or file.py:function"
        ) from None
    finally:
        sys.path.pop(0)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SbpError(f"there is no file {str(path)!r}\n  write file.py:function, where function() makes the model")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of_transformers(name: str, samples: int, tokens: int) -> NamedModel:
    """A model of a config file, or of a class with the config that it has of itself."""
    try:
        import transformers
    except ImportError:
        raise MissingError(
            f"{name!r} is read by transformers, which is not installed\n"
            "  pip install transformers, or write module:function, where function() makes the model"
        ) from None
    path = Path(name)
    if path.exists():
        if path.suffix == ".py":
            raise SbpError(f"{name} is Python, in which a function makes the model\n  write {name}:{_first(path)}")
        try:
            config = transformers.AutoConfig.from_pretrained(path)
            classes = json.loads((path / "config.json" if path.is_dir() else path).read_text()).get("architectures")
        except (OSError, ValueError, KeyError) as error:
            first = str(error).partition("\n")[0]
            raise SbpError(f"{name!r} is no config of transformers: {first}\n  give it a config.json") from None
        _starts(config)
        auto: Any = getattr(transformers, classes[0]) if classes else transformers.AutoModelForCausalLM
        model = auto._from_config(config) if classes else auto.from_config(config)
        return NamedModel(type(model).__name__, model, _words(model, samples, tokens))
    cls: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise SbpError(
            f"no model is called {name!r}\n  "
            + did_you_mean(name, dir(transformers), "write a class of transformers, such as LlamaForCausalLM")
            + "\n  a model of your own is module:function, or file.py:function"
        )
    make: Any = cls
    config = make.config_class()
    _starts(config)
    model = make(config)
    return NamedModel(name, model, _words(model, samples, tokens))


def _first(path: Path) -> str:
    """The name of a function that may be meant."""
    return next(iter(_makers(_file(path))), "FUNCTION")


def _starts(config: Any) -> None:
    """A decoder that is fed its labels begins with a word that some configs do not have of themselves."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def _words(model: nn.Module, samples: int, tokens: int) -> dict[str, torch.Tensor]:
    """A batch of words, with labels, for a model of language."""
    if not hasattr(model, "config"):
        raise SbpError(
            f"there is no batch for {type(model).__name__}\n  have the function return (model, batch), on meta too"
        )
    words = torch.zeros(samples, tokens, dtype=torch.long, device="meta")
    return {"input_ids": words, "labels": words.clone()}
