"""From Python to a logical graph: every ATen call of a step, none of them in place.

trace runs the function: module_state has put fakes in the place of parameters, training_calls stands for autograd and
optimizers, the interceptor sees every ATen call and puts it on the tape, which says writes in place without them
(inplace).

arguments               tensors of a call by path, and what a step is made anew for
declared                factories with a placement, and `to_global`, inside of a step
caches, results         caches of transformers among arguments, taken apart; what a step returns and makes of caches
repeats                 one of layers that are alike is traced, and stands for the others
eager_calls             modules and functions that run eagerly, each call an op; eager_trial learns what one gives back
own_backward, packed    autograd Functions, packed sequences
calls                   single ops: what norms write, what a recomputed region keeps, what torch itself says of a call
"""
