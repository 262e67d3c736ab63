"""Schedules of pipelines.

definition on formula   marks and orders as data; text: as text
pipeline                the network of a pipeline under one
chunk_ends              what is done once a step for each chunk, as actors beside
preview                 what it would do, before anything runs
schedule                a definition that shows its preview
published               those of the literature
v_orders, dual_orders   orders of these that marks do not say
"""
