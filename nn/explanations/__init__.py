"""Why a call lies as it does: `flow.explain`, what it gives, and `flow.explicit`; and why a step does, and what it did.

explain, explanation, explicit     of calls
step_report      of a step: costs, choice, memory; idle_axes: what axes that do nothing could do
step_timeline    what ran when; step_views: these and pictures, as methods of a graph; graph: `sbpflow.nn.Graph`
"""
