"""Compiled steps as they run.

program          a graph run as one function
chunks -> tasks -> variant     parts of a pipeline, what is done for a micro-batch, and that compiled
gradient_homes   gradients that each micro-batch brings home, and not all of them behind the last
network          tasks as actors under a schedule's marks; transfers: what they hand to other ranks
pairs            which tasks that an order joins run together, and two of them by turns
proved_pipeline  that network proved to end, asked for before anything runs; weights/ says what micro-batches see
bound_tasks      its tasks made to run; pipeline: what drives all micro-batches of a step
recorded_work    a step as a graph of its card, which reads rates of optimizers from card_rates
costs, footprint     predicted seconds; bytes under way, of what task_memory says of each task
"""
