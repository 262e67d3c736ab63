"""Optimizers that need whole matrices: one rank, the owner, has all of a matrix for a step and keeps its state.

kinds     which optimizers step tensor by tensor; users say it of their own
balance   the owners, by what a step of each costs
states    of owners, as all processes know them
step      torch's own step, of each owner on what it owns, between two bundles of moves
"""

from . import step as step
