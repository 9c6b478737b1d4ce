"""Representation of programs: their nodes, and the methods of choosing. Independent of the language
that makes programs and the backends that play them.
"""
