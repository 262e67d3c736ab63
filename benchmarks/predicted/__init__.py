"""Predicted steps beside measured ones: on ranks of this machine, and of models on one device."""
