"""A step on a part of the batch: micro-batches, and slices of their sequences, as an axis of the rule book.

batch        the arguments cut into micro-batches or slices, results put together
along        how each value of the batch's step lies along time, asked of the book op by op
sorted_rows  rows that a micro-batch sorts for itself and puts back; row_facts: what is known of their keys and counts
owned_samples    samples that are taken one by one, of which each is in one micro-batch
peel         the graph of one micro-batch, taken off that; micro: as a value, with the arguments that it has besides
prologue     the values that are computed once before; attention: keys and values between slices of a sequence
attention_blocks    attention of a block of queries and one of keys, forward and backward
"""
