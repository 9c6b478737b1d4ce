"""Execution of a run: its branches, how their nodes are played, and how they are pushed down to a
backend that plays whole programs. Knows backends only by their hooks.
"""
