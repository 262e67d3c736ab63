"""A graph as text that parses back: written, and read by a grammar."""
