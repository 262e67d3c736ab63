"""Graphs: a model captured, its signatures chosen together, and run."""

from .graph import Graph, compile

__all__ = ["Graph", "compile"]
