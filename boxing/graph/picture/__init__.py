"""Pictures of a graph: what is painted, the nodes it becomes, the text Graphviz reads, the file."""
