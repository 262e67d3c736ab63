"""Optimizers of a graph: torch's own steps on plain shards, gradients clipped."""
