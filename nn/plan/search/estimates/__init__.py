"""Estimates of degrees of parallelism: by a plan of one layer of each stage what all layers take.

degrees        all choices of degrees, with the plan of each
blocks_again   which of the blocks run again, whole or but for products
shorter_model  the same model with fewer layers, planned for what these take
stage_figures  what a first, a middle and a last layer take, by a plan of these three
ahead          figures that are likely to be asked for next, made by a second process
estimate       a step and its memory by these figures, with the schedule simulated
estimating     the choices that are estimated, one after the other
"""
