"""Models of global parameters.

annotate, outline       say where layers live and parameters lie; print it
flows                   say how what goes into modules, and comes out, is to lie
offload                 say what lies on the host meanwhile
recomputation           say which modules the backward runs again
kept_ops, attention_core    the words for what of them is kept, and what attention makes
replay, core_replay     run them again without a graph
balance                 layers in runs, where nobody said where stages end
slots                   where modules hold parameters and buffers; puts global ones there
reading                 when threads compute with weights, and a refit waits
to_global, replacement  make parameters global, with all that hangs on them
materialise, initialisers   give values to a model that was built without
load                    notes where values are in files, or reads them
same_values             ranks have the same before each keeps its part
"""
