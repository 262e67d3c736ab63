"""Networks that run.

partition, ranked       a network on several processes, and the whole as its ranks run it
runtime on threads, queues     a thread a queue, where the order is open
inline on static_order  the calling thread alone, where it is known
channel, bus, answers   values between processes, errors on all, what may be let go by a replay of the proof
job, progress           what a step needs, whether it goes on
card                    streams and events in the place of waits
"""
