"""The parts of a physical graph that one rank runs, apart from their order.

segments     runs of ops between which nothing moves; random: numbers drawn between them
localise     ops of a segment on a rank's shards; card_kernels: as cards that are not here would run them
recompute    regions that are run again; saved_inputs: inputs that a backward reads again
registers    what instructions read and write, and transfers between them
last_used    what equal layers and equal steps have in common, worked out once
"""
