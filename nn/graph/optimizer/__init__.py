"""Optimizers of a graph.

adopt        parameters and states of torch's optimizers as a graph has them
on_shards    torch's own step on plain shards
"""
