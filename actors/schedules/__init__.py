"""Schedules of pipelines.

schedule on formula     marks and orders as data; text: as text
published, v_orders     those of the literature
pipeline                the network of a pipeline under one
preview                 what it would do, before anything runs
"""
