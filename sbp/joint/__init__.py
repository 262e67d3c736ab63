"""Choosing all signatures of a graph together.

demands          what is said beforehand
placements       where ops run and sources live
options, source_options, preferred_cuts, along_split     the candidates of each
op_cost, move_cost     what a candidate, and a pair of them, costs
repeated_blocks, regions, uses     what is alike, what is recomputed, who uses what
formulate -> problem   all of that as numbers
solver/          the choice
"""
