"""Kernels of ops, wherever tensors lie: work that devices have, without seconds.

flops      FLOPs of the forward of a call
kernels    FLOPs, reads and writes of its tensors, and launches, of forward and backward
update_kernels   how many kernels an optimizer's step is, and how often they read and write
fused      runs of ops that a compiler makes one kernel of
"""
