"""Weights that travel from one model to another, which may lie otherwise, elsewhere and in another dtype.

names     which tensor of one model is for which of the other
changes   which of these differ from what was sent last, and numbers that the other's dtype does not hold; of all ranks
refit     the weights sent, and the report of it
addends   tensors of groups of ranks as one, their sum: for averages of models that were trained apart
"""
