"""A step on a part of the batch: how parts relate to the whole, and what is known before the first."""
