"""Generation by a compiled step: prefill and decode are steps of one plan.

generation       `flow.nn.generation`: the step in the place of a model's own forward, while `model.generate` runs
"""
