"""What belongs to a process: import paths that its children inherit, marks of its threads, and random
ids.
"""
