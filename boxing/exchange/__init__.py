"""Plans as they run.

execute      a boxing on the shards of this process, move by move; buffer: boxes of a shard
refill       many tensors written into the shards of others
transport    from rank to rank in one process; dist: between processes,
             by collectives, sends and receives, or shared_memory
value_message  values that nobody planned on their way to other ranks, without pickle
watch        no rank waits for one that never comes, nor at the store (store_wait); streams: CUDA streams on the side
"""
