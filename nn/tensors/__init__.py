"""The global tensor: the class, how one is made, moved, differentiated, copied, and shown.

factories, like_factories   make one: from plain tensors, from shards, by torch's own names
tensor on shell             the class, and the empty tensor that torch sees of it; tokens on ranks that are not here
moves                       to another layout, asked for or implied; dtensor: to torch's words and back
autograd, hooks             gradients beside the local autograd of shards
copies, show                pickles and copies; text and tables
agreement, seeds            whether ranks mean the same, and draw the same
memory_formats              how kernels lay out results, where torch does not tell
"""
