"""The state of Python outside of a graph that a capture may change, and how it is put back.

contents     the kinds of containers that Python has: what is in one, and how it is put back
containers   those that a program can reach, as they were before
caches       functions with an lru_cache among these
settings     of torch, and states of random numbers
draws        of these: whether a program draws numbers that are none of torch, and where
"""
