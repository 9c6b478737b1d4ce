"""Serialisers from languages to the texts that engines read: Lark, GBNF, regexes. Independent of
any engine's API.
"""
