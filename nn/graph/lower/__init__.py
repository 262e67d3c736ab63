"""From a physical graph to what one rank runs.

segments     runs of ops between which nothing moves; random: numbers drawn between them
localise     ops of a segment on a rank's shards
order        forward and backward as one list, with what is gathered or run again (saved_inputs, recompute), and
             parts of gradients added up (gradient_parts); instructions: what it is made of
last_used    what equal layers and equal steps have in common, worked out once
overlap      which moves go on beside the work, and when values are let go; offload: what lies on the host meanwhile
"""
