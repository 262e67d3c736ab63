"""Networks of actors and the protocol by which they fire.

network       actors, registers and queues as values
protocol      what an actor does on each message, as a table and a pure step; state: all actors of a process
simulate      a network with a clock in the place of threads
feasibility   whether it ends, and who waits for whom; reorder: the smallest change with which it does
"""
