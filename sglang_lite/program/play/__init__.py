"""The player of programs: rules of nodes, without threads, tokens or models. A driver performs what
it asks for.
"""
