"""What a step did: its records on one clock, replayed, beside the simulation, and what to try."""
