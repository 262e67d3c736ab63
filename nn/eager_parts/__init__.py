"""Eager parts: modules and functions that a compiled step runs eagerly, on global tensors, between its captured parts.

marks     `flow.nn.eager`: the mark on a module or a function
held      the tensors of a module, others in their place for a while
part      a part as an op of a graph: its signature, its forward and its backward
"""
