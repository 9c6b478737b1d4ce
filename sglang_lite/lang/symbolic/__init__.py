"""Runs a program's body with symbols in place of the values that are only known at run time, and
builds a graph from the trace.
"""
