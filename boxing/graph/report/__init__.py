"""What a graph costs and why: as tables of text, and as one HTML page."""
