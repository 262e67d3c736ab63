"""From a physical graph to what one rank runs: segments, local ops, and one order of instructions."""
