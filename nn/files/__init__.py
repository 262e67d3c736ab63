"""Files of weights: which tensors they hold, under which names a model knows these, and reading parts of them.

values            a value in files, whole or put together from several, and how a part of it is read
headers           what the files of a path hold, or why they cannot be read
names             the values of a model's names, for models of transformers too
pieces            which part of a tensor each process writes, and which counts for the checksum of what all read
held              the boxes that this process writes, and the numbers in those that it has
checksums, sums   checksums that add up over parts, and over processes
raw               bytes at offsets of files, counted
reading           shards from values, by several processes; load: into a model, or noted on one without memory

joint_file        one file that several processes write; pretrained: `save_pretrained` of transformers by such files
torch_protocol    how torch.distributed.checkpoint asks a global tensor for its pieces
served            files of other hosts, read over a socket
"""
