"""Reports: what a graph costs and why.

facts        the figures and reasons; roles: parallelism of modules in people's words
summary      thirty lines; map: the model on one page; lines: what they share; step_parts: what seconds are spent on
page         HTML to walk through: page_data as JSON, of folded_graph and what is walked, static/ and vendored libraries
report       the facts of a graph with all of these, and all tables as text
"""
