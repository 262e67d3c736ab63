"""The weights that micro-batches see, and where gradients of them go.

same_weights         all of a step see the same, and what is done once a step is done before and behind them
chunk_weights        the same, with that done chunk by chunk beside micro-batches: chunk_work
weight_versions      schedules without a flush: versions that readers hold, or none, as unpinned_weights has it
"""
