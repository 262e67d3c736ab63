"""Instructions: a physical graph as one list of things to do, each with its source text and the memory it takes.

instruction     the base of all of them, and the memory of one rank; a new kind is a class with a `source`, and with an
                `effect` on that memory, unless it takes what it writes and no more
computing       segments forward and backward, draws, seeds, sums; moves: made, started and waited for, encoded
order           forward and backward as one list, with what is gathered or run again
overlap         which moves go on beside the work, and when values are let go; offload: what lies on the host meanwhile
codegen         a list as one Python function
"""
