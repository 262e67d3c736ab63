"""Values of a model that was built without.

materialise     parameters and buffers made, with the values that one device would have drawn
initialisers    of modules, by what they are
noted_values    values that wait in files, say, until a model is global
noted_states    states of optimizers that are in files too, until a graph adopts these
same_values     whether all ranks pass the same ones
"""
