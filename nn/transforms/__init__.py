"""Transforms of torch.func and forward-mode differentiation on global tensors, in eager code.

stand_in        a tensor of the logical shape, which transforms wrap in the place of a global one
levels          where global tensors come into transforms, and out of them
gradients       `torch.autograd.grad`, also for several gradients at once
flex_attention  attention whose scores functions change or mask, written in ops
"""
