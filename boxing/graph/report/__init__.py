"""Reports: what a graph costs and why.

facts        the figures and reasons; roles: parallelism of modules in people's words
summary      thirty lines; page: HTML; map: the model on one page; lines: what they share
report       the facts of a graph with all of these, and all tables as text
"""
