"""Compiled steps as they run.

program          a graph run as one function
chunks -> tasks -> variant     parts of a pipeline, what is done for a micro-batch, and that compiled
gradient_homes   gradients that each micro-batch brings home, and not all of them behind the last
added_actors     actors that a user added, among these
network          tasks as actors under a schedule's marks; transfers: what they hand to other ranks
pipeline         all micro-batches under a schedule, which says what weights they see: same_weights, weight_versions,
                 where nobody holds a version by unpinned_weights
chunk_work -> chunk_weights     the same for all, where what is done once a step is done by chunk
costs, footprint, timeline     predicted seconds, bytes under way, and what a step did
"""
