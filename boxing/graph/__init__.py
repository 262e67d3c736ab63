"""The physical graph: its parts, its text, its picture, and what it costs."""
