"""Plans: one text beside a model that says how it runs.

language            texts, lines and statements
taken               lines that transformers' own configs stand for
grids               the grid of a plan, on the ranks that there are
assignment          which line counts for which module, parameter and argument
notes               what is said of a model, noted on it
compiled            compile: a step by a plan
answer              the plan that runs, with all said
expect, check       what is expected of a plan; a plan held against a model, without a device
plan                Plan, with all of that
resting             bytes of a training between steps
training            failures, saves and restarts of a training
prediction          what a step and a training take on a cluster that nobody has rented
search              the cheapest plan, what else was tried, and why not that
commands            the command line
"""
