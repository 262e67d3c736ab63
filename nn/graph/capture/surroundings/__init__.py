"""The state of Python outside of a graph that a capture may change, and how it is put back.

contents     the kinds of containers that Python has: how one is read, and how it is put back
containers   those that a program can reach, and functions with an lru_cache among these, as they were before
settings     settings of torch, and states of random numbers
clocks       which clocks and chance of the system a program asks, and where
draws        streams of random numbers and iterators: whether a program takes of them, and where
garbage      circles of objects, which nobody looks for while a step is planned
"""
