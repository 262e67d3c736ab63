"""Models of global parameters.

annotate, outline       say where layers live and parameters lie; print it
balance                 layers in runs, where nobody said where stages end
slots                   where modules hold parameters and buffers; puts global ones there
to_global, replacement  make parameters global, with all that hangs on them
materialise, initialisers   give values to a model that was built without
"""
