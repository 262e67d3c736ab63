"""Constants of devices, fitted where they are: kernels are timed, and figures follow from their times.

timing     products, attention, pointwise ops, empty kernels and copies of several sizes, run and timed
hosts      the devices of the hosts of a run
fit        a device's peaks, shares and launch by these times, with the error on sizes that were left out
"""
