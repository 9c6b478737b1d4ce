"""Python types as constraints: the texts of their values, their schemas, and readers. Independent
of grammars and engines.
"""
