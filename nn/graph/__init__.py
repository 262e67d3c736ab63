"""Graphs: a model captured, its signatures chosen together, and run."""
