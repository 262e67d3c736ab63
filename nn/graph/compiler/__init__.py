"""Segments as functions: forward and backward, simplified, given to a backend; the step as Python source."""
