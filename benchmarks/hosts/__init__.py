"""Training over slow links between hosts that are played: models, networks and ways; python -m benchmarks.hosts."""
