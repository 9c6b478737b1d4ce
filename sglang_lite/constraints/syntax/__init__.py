"""Parsers from text to nodes and languages: regexes, GBNF, Lark. Knows no schemas but as records, and no engine."""
