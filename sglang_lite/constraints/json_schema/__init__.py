"""JSON schemas: as exact languages, and checks of finished values. Knows no Python types and no engine.

A schema is read (document.py, reader.py, keywords.py, applicators.py) as a set of values (values.py, numbers.py), in
which references, `allOf`, `anyOf`, `oneOf`, `not`, `if` and the like are no more, and that set is written as a grammar
(writer.py). normal_form.py does both; validator.py checks finished values.
"""
