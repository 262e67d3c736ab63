"""Why a call lies as it does: `flow.explain`, what it gives, and `flow.explicit`; and why a step does, and what it did.

explain, explanation, explicit     of calls
step_report      of a step: costs, choice, memory; idle_axes: what axes that do nothing could do
jittered_step    what a step is expected to take on uneven devices; lockstep: who waits for whom; slowest: of how many
step_timeline    what ran when; step_views: these and pictures, as methods of a graph; graph: `sbpflow.nn.Graph`
"""
