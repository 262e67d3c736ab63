"""Records of a step.

clocks       of all ranks on one clock
timeline     what ran when, beside the simulation; chart: as a picture
replay       on the network: what each firing waited for; advice: what to try
"""
