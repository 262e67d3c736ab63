"""The global tensor: the class, how one is made, moved, differentiated, copied, and shown.

factories, like_factories   make one: from plain tensors, from shards, by torch's own names
handle on shell             shards and how they lie, on the empty tensor that torch sees; tokens on ranks that own none
moves                       to another layout, asked for or implied; dtensor: to torch's words and back
autograd, hooks             gradients beside the local autograd of shards
show                        text and tables
tensor                      the class that users see: a handle with all that is above; copies: what files name of it
meeting                     the placement where arguments of one function meet
agreement, seeds            whether ranks mean the same, and draw the same
memory_formats              how kernels lay out results, where torch does not tell
"""
