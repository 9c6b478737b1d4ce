"""Executes runs: their branches, the nodes of each branch, and whole programs sent to a backend.
Depends on backends only through their interface.
"""
