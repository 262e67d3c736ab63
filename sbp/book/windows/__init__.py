"""Ops whose windows reach beyond a rank's piece: where their dim is split, ranks take what their windows see.

reach         what windows see, as a rule says it, and what they see beyond the ends of a tensor
convolution   convolutions, and transposed ones
pooling       pools of means and of maxima
resampling    upsampling by whole factors
cutting       windows as a dim of their own, and paddings with a number
borders       paddings with what a tensor has itself
"""

from importlib import import_module
from pkgutil import iter_modules

__all__: list[str] = []

for module in iter_modules(__path__):
    import_module(f".{module.name}", __name__)
