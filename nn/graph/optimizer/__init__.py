"""Optimizers of a graph.

trained          a parameter with where its gradient, its optimizer's pieces and its state lie
adopt            parameters and states of torch's optimizers as a graph has them
on_shards        torch's own step on plain shards, for those that treat every element alone
on_whole         that of others, on whole tensors
relocation       what a model has, brought to where its next plan wants it
late_mean        means of late updates of parameters, which a pipeline without a flush corrects them by
followers        masters and states, which go where their parameters go
adopted_model    values of modules as a graph has them, and how gradients change these
before_step -> post_validation     steps of chunks before all gradients are known, and how they are made good
at_rest          bytes that ranks hold of these between steps
"""
