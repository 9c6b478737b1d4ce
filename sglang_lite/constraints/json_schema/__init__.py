"""JSON schemas as exact languages, and validation of finished values. Independent of Python types
and engines.

A schema is read as a set of values (values.py, numbers.py) in which references, `allOf`,
`anyOf`, `oneOf`, `not`, `if` and the like are resolved (document.py, reader.py,
keywords.py, applicators.py). That set is written as a grammar (grammar_writer.py and
write_*.py). normal_form.py does both steps; validator.py checks finished values.
"""
