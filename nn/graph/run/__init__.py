"""Compiled steps as they run.

program          a graph run as one function
chunks -> tasks -> variant     parts of a pipeline, what is done for a micro-batch, and that compiled
gradient_homes   gradients that each micro-batch brings home, and not all of them behind the last
open_network     what a user adds to these as actors, as the program asks it
network          tasks as actors under a schedule's marks; transfers: what they hand to other ranks
pairs            which tasks that an order joins run together, and two of them by turns
pipeline         all micro-batches under a schedule; weights/ says what of these they see
costs, footprint     predicted seconds; bytes under way, of what task_memory says of each task
"""
