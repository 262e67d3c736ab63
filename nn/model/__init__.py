"""Models of global parameters: annotated, printed as an outline, made global, given values."""
