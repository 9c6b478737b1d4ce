"""Runs a program's body with symbols in place of values that are only known at run time. Builds a
graph from the trace.
"""
