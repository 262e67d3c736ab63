"""From a logical graph to a physical one.

choose       all of it: decompose ops, copy what is made of arguments (replicas), formulate and solve, insert the moves
parameters   where a model's parameters live, how they are to lie, and how they are made to
memory_limit the cheapest plan below a limit; shortage: the error where there is none, offload_fix: a fix for it
blocks_again blocks that are run again where nothing fits without, or that takes less
stage_balance  layers of a pipeline cut by the seconds that they take in the captured step: stage_costs has these, and
stage_work   the step that a schedule makes of a cut
stage_split  stages of several devices each, and which; device_groups: those that are tried
"""
