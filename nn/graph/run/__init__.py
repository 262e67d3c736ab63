"""Compiled steps as they run: as one function, or as a pipeline of actors."""
