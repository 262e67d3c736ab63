"""A step on a part of the batch: micro-batches, and slices of their sequences, as an axis of the rule book.

batch        the arguments cut into micro-batches or slices, results put together
along        how each value of the batch's step lies along time, asked of the book op by op
sorted_rows  rows that a micro-batch sorts for itself and puts back; row_facts: what is known of their keys and counts
sample_parts     eager parts that do to each sample what they do to it alone, as far as a trial tells
owned_samples    samples that are taken one by one, of which each is in one micro-batch
whole_batch  ops that need all micro-batches, which run once behind all forwards; needs_all: the error of others
peel         the graph of one micro-batch, taken off that; micro: as a value, with the arguments that it has besides
prologue     the values that are computed once before; attention: keys and values between slices of a sequence
attention_blocks    attention of a block of queries and one of keys, forward and backward
"""
