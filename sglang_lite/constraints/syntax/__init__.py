"""Parsers that convert regexes, GBNF and Lark grammars to nodes and languages. JSON schemas inside
a grammar are not converted here. Independent of grammar engines.
"""
