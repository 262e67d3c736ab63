"""The command line of plans: what `python -m sbpflow` reads, and what it answers.

words               parsers that name the nearest of what they know
subcommands         check, plan, explain, report, draw, diff, and simulate for a model
plan_command        plan: checked, found, or many in a sweep
cards               cards by their names, such as 8xH100
model_source        models by their names
users_error         what a model's own code raises
"""
