"""Parsers from text to nodes and languages: regexes, GBNF, Lark. Schemas in grammars stay records.
Independent of engines.
"""
