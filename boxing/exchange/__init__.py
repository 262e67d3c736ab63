"""Plans as they run: buffers, and the ways from rank to rank."""
