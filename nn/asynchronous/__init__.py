"""Training in which weights are read while they change, and models that train apart.

delayed_rate      learning rates by how late a pipeline reads weights
parameter_server  weights on servers, which workers pull and push gradients to, within a bound of delay
servers           which server has which weights
lock_free         threads that change weights without waiting for each other
meetings          models of groups of ranks that train apart and meet: local SGD, DiLoCo
"""
