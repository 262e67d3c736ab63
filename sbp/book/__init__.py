"""The rule book: lines of text in `.rules` files and Python functions, all in this folder, found by themselves."""

from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules

from ..rule import load

__all__: list[str] = []

for entry in sorted(files(__name__).iterdir(), key=lambda entry: entry.name):
    if entry.name.endswith(".rules"):
        load(entry.read_text(encoding="utf-8"), entry.name)
for module in iter_modules(__path__):
    import_module(f".{module.name}", __name__)
