"""Execution of a body with symbols in place of the values that only a run has, and the graph that
results.
"""
