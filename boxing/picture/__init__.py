"""Pictures of moves: the graph of a plan, the matrix of all moves, the colours of both."""
