"""Records of a step, and pictures of networks.

clocks       of all ranks on one clock
timeline     what ran when, beside the simulation; chart: as a picture
advice       what to try
diagram      the protocol's table and networks as pictures; preview_chart: schedules before anything runs
"""
