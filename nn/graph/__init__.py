"""Graphs: a model captured, its signatures chosen together, and run.

Data passes through the folders in this order:

capture      a step of Python -> a logical graph of ATen calls
choose       -> a physical graph: ops taken apart, signatures chosen, moves inserted, within a limit of memory
microbatch   (in pipelines) -> the graph of one micro-batch, and how results of all are joined
lower        -> segments, and local calls of a rank
compiler     -> segments as functions
instructions -> things to do, each of which writes its lines of Python
tasks        -> these by chunk; a step without micro-batches is one chunk
memory       what all of that takes at its peak, before and after it is compiled
run          -> a step that runs: one function, or actors under a schedule
optimizer    torch's optimizers on the graph's parameters

`graph` is what `sbpflow.nn.Graph` and `compiled` are made of, the graph of a model and its loss function. `plan` leads
through the folders by the list in `passes`, in pipelines by way of `plan_pieces`, which gives `pieces`; `step` has what
was planned run, `microbatch_runner` where it is in micro-batches, `replayed_runner` where a card replays it, with the
update if `recorded_update` finds no reason against it; `launches` runs steps behind each other while the
caller goes on, and `views` has figures of the step that ran last.
"""
