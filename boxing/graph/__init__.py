"""The physical graph: its parts, its text, its picture, and what it costs.

insert       a logical graph and a choice -> physical, with all moves; transpose: and those of gradients
physical     the graph as a value; memory_order: how its pieces lie; buckets: gradients that move together
blocks, move_table     what repeats, and every move with its price; measures: memory of a rank, course of micro-batches
text/, picture/, report/
"""
