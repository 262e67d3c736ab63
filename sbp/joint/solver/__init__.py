"""Solving a problem of choices, within a limit of memory.

solve      the way through: fold equal blocks, best without a limit; else search
best       one price for all: presolve, messages, eliminate on tables; ilp or mini_buckets where that is too wide
search     with limits: measured sums at multipliers, bounds by branches
mixtures, local_search, polish     plans near known ones
"""
