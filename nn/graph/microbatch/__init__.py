"""A step on a part of the batch.

batch        the arguments cut into micro-batches or slices, results put together
analysis     which part of the batch's value each value of a micro-batch is, by parts and the rule book
align        the step of a micro-batch beside that of the batch, op by op; written_sizes: where they may not differ
rewrite      the graph of a micro-batch, and how totals are made of all
prologue     what is computed once before; attention: keys and values between slices of a sequence
"""
