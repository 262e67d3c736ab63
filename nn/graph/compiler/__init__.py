"""Segments as functions.

joint            forward and backward of a segment as two traced graphs; split_backward: the second in two
simplify         fewer views, torch's own functions for ATen ops
backends         a callable: by autograd, as code, by inductor; compiled_segments: those of a graph; inside: bytes
codegen          a whole order as one Python function; move_source: the moves of it; source_text: lines and names;
                 generated_calls: what it calls
"""
