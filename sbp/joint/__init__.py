"""Choosing all signatures of a graph together."""
