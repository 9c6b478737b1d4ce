"""Execution of a run: its branches, how their nodes are played, and how they are handed over to a backend that plays
whole programs. Knows backends only by their hooks."""
