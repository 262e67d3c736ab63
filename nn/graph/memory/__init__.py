"""The account of memory.

liveness     which values are live when, on a rank; equal_ranks: it is worked out once for those that are alike
account      by kind, with what an optimizer keeps; the same for plans to choose from and for the one that runs
"""
