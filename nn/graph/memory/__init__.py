"""The account of memory.

liveness     the bytes that things to do take on a rank; equal_ranks: worked out once for those that are alike
resident     what lies there besides, told by who keeps it: states of optimizers, versions of weights
account      the bytes by kind; the same for plans to choose from and for the one that runs
"""
