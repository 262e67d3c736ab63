"""Ops whose windows reach beyond a rank's piece: where their dim is split, ranks take what their windows see.

reach         what windows see, as a rule says it, and what they see beyond the ends of a tensor
convolution   convolutions, and transposed ones
pooling       pools of means and of maxima
resampling    upsampling by whole factors, and shuffles of channels into space
cutting       windows as a dim of their own, slices, and paddings with a number
borders       paddings with what a tensor has itself, and rolls
regrouping    views of dims that are cut where the view's dims do not end
"""

from importlib import import_module
from pkgutil import iter_modules

__all__: list[str] = []

for module in iter_modules(__path__):
    import_module(f".{module.name}", __name__)
