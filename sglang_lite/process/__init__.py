"""Utilities that concern the whole process: import paths that its children inherit, marks of its
threads, and random ids.
"""
