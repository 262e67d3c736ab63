"""From Python to a logical graph: every ATen call of a step, none of them in place.

trace runs the function: module_state has put fakes in the place of parameters, training_calls stands for autograd and
optimizers, the interceptor sees every ATen call and puts it on the tape, which says writes in place without them
(inplace). layer_reuse traces one of repeated layers, which likeness finds; what these are handed and call, such as
caches, is called for each (object_calls), and read_flow tells where a number goes that they read.

arguments               tensors of a call by path, and what a step is made anew for
declared                factories with a placement, and `to_global`, inside of a step
own_backward, packed    autograd Functions, packed sequences
calls                   single ops: what norms write, what a recomputed region keeps, what torch itself says of a call
"""
