"""The account of memory: which values are live when, on every rank, and the kinds that they are of."""
