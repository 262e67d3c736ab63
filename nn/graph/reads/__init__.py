"""All that a capture read besides tensors, and whether it is still so: by this a plan is known to be good.

watch     which attributes code reads of modules and of other objects, while it is captured
code      which names a function takes from around it
walk      from the graph, its modules and the functions that they run to every value that was in reach
guard     these values in flat columns, compared in a pass before each step
"""
