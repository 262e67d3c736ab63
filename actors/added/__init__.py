"""Actors that are added to a network that somebody else made.

addition     a network that was opened, with the work of what was added; and what it changes, checked and proved
bpipe        actors that level the memory of a pipeline's stages
idle         the time that queues are idle, and how much of it other work takes
value_link   registers between processes whose values nobody planned
"""
