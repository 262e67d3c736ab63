"""Hosts of a run, and how each knows what ranks of the others are at.

page       what a rank is at, in memory of a fixed form: written by it, read by all
interface  the address of this host in the run
line       a connection between processes of two hosts, with the run's key
heartbeat  lines to all other hosts: pages of their ranks, who has died there, and which host is silent
"""
