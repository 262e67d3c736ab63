"""A graph as text that parses back.

text         written
syntax -> parse      read: the grammar's lines, then names, ops and layouts looked up
"""
