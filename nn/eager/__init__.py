"""One torch call on global tensors: dispatched, captured, its signatures chosen, and kept as a recipe."""
