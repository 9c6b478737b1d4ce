"""Constraints on generated text: regexes, schemas, grammars, Python types. Independent of tokens, models and torch.

User input becomes a record of the protocol (coerce.py, schema.py, structural_tag.py, python_types/), a record becomes a
`Language` (language.py; parsers in syntax/, schemas in json_schema/, both built on formal/), and a `Language` becomes
the text that a grammar engine reads (emit/). matching.py and random_texts.py work on languages directly; only
byte_matcher.py calls an engine (llguidance, with one token per byte). The public functions are in `sgl.grammar`, which
also handles tokens.
"""
