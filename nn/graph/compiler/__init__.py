"""Segments as functions.

joint            forward and backward of a segment as two traced graphs; split_backward: the second in two
simplify         fewer views, torch's own functions for ATen ops
backends         a callable: by autograd, as code, by inductor; compiled_segments: those of a graph; inside: bytes
source_text      lines and names of generated functions; generated_calls: what they call
"""
