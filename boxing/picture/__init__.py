"""Pictures of moves.

draw         a plan as a graph
matrix       all moves between signatures
palette      colours, bytes and seconds in words, for every picture and table
"""
