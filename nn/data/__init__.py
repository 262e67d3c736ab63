"""Data: each process loads the samples of its own ranks, and batches come as global tensors.

sources      datasets and loaders as they are given, and the options that are taken from them
order        the order of samples in an epoch, a function of seed and epoch alone
shares       the rows and tokens of a batch that ranks hold
reading      samples of this process, in its own thread or in workers; read_ahead, own_random: how
batches      global tensors of what was read
sharded_data all of it as one iterable with a position; whether ranks read the same
token_file   a dataset of tokens in a file
joined       batches that processes have read by themselves as one, and results taken apart
"""

from .joined import joined, parted
from .sharded_data import ShardedData, shards
from .token_file import TokenFile

__all__ = ["ShardedData", "TokenFile", "joined", "parted", "shards"]
