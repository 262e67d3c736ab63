"""States of optimizers in checkpoints.

owners          the parameters of a model that optimizers hold, by their names
saved_states    all of an optimizer as a checkpoint has it
loaded_groups   numbers of groups again, by the parameters in them
loaded_states   states again, as the parameters lie now
"""
