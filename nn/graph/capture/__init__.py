"""From Python to a logical graph: every ATen call of a step, none of them in place."""
