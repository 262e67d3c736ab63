"""Optimizers of a graph.

adopt            parameters and states of torch's optimizers as a graph has them
on_shards        torch's own step on plain shards
adopted_model    values of modules as a graph has them, and how gradients change these
"""
