"""The weights that micro-batches see, and where gradients of them go.

weights              what a program asks them, and what each kind answers for itself; of a step under way: step_state
same_weights         all of a step see the same, and what is done once a step is done before and behind them
chunk_weights        the same, with that done chunk by chunk beside micro-batches: chunk_work
validated_weights    the same, where optimizers step chunk by chunk and that is made good: post-validation
weight_versions      schedules without a flush: versions that readers hold
unpinned_weights     the same, where nobody holds a version
"""
