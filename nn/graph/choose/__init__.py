"""From a logical graph to a physical one: ops taken apart, signatures chosen together, moves inserted."""
