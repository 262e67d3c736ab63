"""Modules that the backward runs again.

recomputation   the note, which is the module's own forward: by torch.utils.checkpoint, or as a region of a graph
own_forward     a forward that stands in the place of a module's own, as that note and others do
kept_ops        the ops that are kept, by the words for them
attention_core  the ops of an attention between query, key and value and its context
replay, core_replay   eager modules of which the core alone is run again
"""
