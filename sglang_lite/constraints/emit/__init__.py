"""Serialisers from languages to the text that engines read: Lark, GBNF, regexes. Independent of any engine's API."""
