"""The network of a run: which process is on which host, what carries bytes between them, and who is still there.

identity     the host that this process is on
hosts        the hosts of a run, by an exchange over the store that its processes met at
absent       ranks that did not come there
wire         the rate of a host's wire, as far as its system tells
guess        two levels for hosts of which nobody measured anything
pairs        which ranks send to each other at once, round by round, so that each level shows alone
fit          latency and bandwidth by the times of messages of several sizes
levels       from the times of all rounds to the levels of a cluster
page         what a rank is at, in memory of a fixed form: written by it, read by all
interface    addresses and interfaces of this host, and which of them is its own in the run
line         a connection between processes of two hosts, with the run's key
heartbeat    lines to all other hosts: pages of their ranks, who has died there, and which host is silent
processes    whether a process of this host runs
connections  what the kernel counts of this process's connections
slow_links   from what hosts sent in a window to the one whose link gives far less than the others
host_traffic what this process sent to other hosts, window by window, and the watch that judges it
"""
