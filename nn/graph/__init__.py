"""Graphs: a model captured, its signatures chosen together, and run."""

from .compiled import compile
from .graph import Graph

__all__ = ["Graph", "compile"]
