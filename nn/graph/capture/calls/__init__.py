"""Single calls of ops, seen at the moment that they are captured.

real_call       torch's own answer to a call, from its kernels, where fakes answer otherwise
strides         places in one device's memory
running_stats   what norms write beside their result
policy          what of a region that is recomputed is kept
"""
