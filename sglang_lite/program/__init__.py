"""Representation of programs: their nodes, and the methods by which `select` chooses. Independent
of the language that creates programs and the backends that execute them.
"""
