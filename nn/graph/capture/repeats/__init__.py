"""Layers that are alike are traced once.

layer_reuse traces one of repeated layers, which likeness finds; what these are handed and call, such as caches, is
called for each (object_calls), and read_flow tells where a number goes that they read. A module that
tokens choose experts of is one op, whatever it computes (expert_calls).
"""
