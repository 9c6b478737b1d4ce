"""Utilities that concern the whole process: import paths for child processes, a mark for engine
threads, and random ids.
"""
