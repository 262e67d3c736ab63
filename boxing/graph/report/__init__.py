"""Reports: what a graph costs and why.

report       the figures and reasons; roles: parallelism of modules in people's words
summary      thirty lines; full: all tables; page: HTML; map: the model on one page
"""
