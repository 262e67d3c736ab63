"""Pictures of moves.

draw         a boxing as a graph
matrix       all moves between signatures
svg          elements, and what charts share
palette      colours of moves, for every picture and table
"""
