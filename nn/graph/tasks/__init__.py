"""Tasks: what a step does, as values.

chunks          the parts of a graph that run one after the other on groups of ranks
gradient_homes  which gradients come home with every micro-batch
tasks           the forward and backward of each chunk, and what it hands to others
straight        these of one chunk and one micro-batch, as one list
"""
