"""Actors that a user adds to a planned step.

additions        `Graph.add`: what is added to the steps of a graph, and which of their arguments registers bring
added_actors     what added work sees of the step's registers, and how values get to other ranks
"""
