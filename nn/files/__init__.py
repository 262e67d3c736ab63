"""Files of weights: which tensors they hold, under which names a model knows these, and reading parts of them.

values    a value in files, whole or put together from several, and how a part of it is read
headers   what the files of a path hold, or why they cannot be read
names     the values of a model's names, for models of transformers too
reading   shards from values, by several processes

pieces          which parts of a tensor a process writes
joint_file      one file that several processes write; pretrained: `save_pretrained` of transformers by such files
torch_protocol  how torch.distributed.checkpoint asks a global tensor for its pieces
"""
