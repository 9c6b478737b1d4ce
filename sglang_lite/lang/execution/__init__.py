"""Execution of runs: their branches, the nodes of each branch, and sending runs to a backend that
executes whole programs. Depends on backends only through their interface.
"""
