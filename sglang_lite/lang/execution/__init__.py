"""A run: its branches, how their nodes are played, and how they are handed over. Knows backends by their hooks."""
