"""Formal languages: character sets, nodes, grammars, automata and an Earley parser. Independent of
syntax and engines.
"""
