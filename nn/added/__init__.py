"""Actors that a user adds to a planned step.

open_graph       `Graph.add`, for the steps that a graph has and will have
additions        what is added to one step, and which of its arguments registers bring
added_actors     what added work sees of the step's registers, and how values get to other ranks
"""
