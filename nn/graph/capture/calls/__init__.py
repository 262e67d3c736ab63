"""Single calls of ops, seen at the moment that they are captured.

real_call       torch's own answer to a call, from its kernels, where fakes answer otherwise
strides         places in one device's memory
running_stats   what norms write beside their result
transforms      calls below vmap and derivatives of torch.func
derivatives     `torch.autograd.grad` of values of the tape
known_answers   what Python may ask of a tensor without values
gradient_hooks  hooks that a forward puts on gradients
policy          what of a region that is recomputed is kept
"""
