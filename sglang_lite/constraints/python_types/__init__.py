"""Python types as constraints: how their values are written as text, their JSON schemas, and
functions that read values back. Independent of grammars and engines.
"""
