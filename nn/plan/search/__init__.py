"""The search for plans: the cheapest one of a model on a cluster, within its memory.

candidates   plans to try: open ones, those that people write
cases        lower bounds of plans that say more, from the open one
lighter      what is tried where these take too much: parts of a batch, blocks run again, the host's memory
trying       candidates in turn, and the best so far
planner      all of that, and FoundPlan
fewest       the fewest cards for which there is a plan
sweep        the same batch on more and more cards, and its chart
runners_up   what else was tried, and why it is not the answer

Where degrees of parallelism are open, all are estimated, and the best few planned in full:

open_degrees   the degrees that a plan leaves open
estimates      what each choice of them takes, by one layer of each stage
seeking        all of that
"""
