"""Layers of experts, each token through those that it chose: their op, what it computes, and modules that are one.

expert_code        what a layer computes of tokens and the experts that they chose, by name
expert_ops         the op, the part of it that is some experts', tokens on their way to other ranks and back
room_ops           tokens put in rooms, so many for each expert, and taken out of them
module_code        a module's own forward as such code, run on the weights of some experts
module_probe       whether a module is a layer of experts: tried on small values
stacked_probe      the same of modules that have a row of every token for every expert
"""
