"""Actors that are added to a network that somebody else made.

addition     a network that was opened, with the work of what was added; and what it changes, checked and proved
bpipe        actors that level the memory of a pipeline's stages
room         slots that registers of a queue use, and the time that more work finds in its bubbles
value_link   registers between processes whose values nobody planned
"""
