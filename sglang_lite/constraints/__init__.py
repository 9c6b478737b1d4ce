"""Constraints on generated text: regexes, schemas, grammars and Python types. Independent of
tokens, models and torch.

User input becomes a record of the protocol (coerce.py, schema.py, structural_tag.py,
python_types/). A record becomes a `Language` (kinds.py, with the parsers in syntax/ and
the schemas in json_schema/, both built on formal/). A `Language` becomes the text that a
grammar engine reads (emit/). matching.py and random_texts.py work on languages directly;
only byte_matcher.py calls an engine (llguidance, with one token per byte). The public
functions are in `sgl.grammar`, which also handles tokens.
"""
