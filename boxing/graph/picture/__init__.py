"""Pictures of a graph.

paint -> scene      what is drawn of a graph, as deep as asked; merged_nodes: ops that share a node
dot -> draw         in Graphviz' language, all or about a screen of it, and into a file
"""
