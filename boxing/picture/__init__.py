"""Pictures of moves.

draw         a plan as a graph
matrix       all moves between signatures
palette      colours of moves, for every picture and table
"""
