"""Constraints on generated text: regexes, schemas, grammars, Python types. Knows no tokens, no model and no torch.

What users write becomes a record of the protocol (coerce.py, schema.py, structural_tag.py, python_types/), a record a
`Language` (language.py; the parsers in syntax/, the schemas in json_schema/, both over formal/), and a `Language` the
text that an engine reads (emit/). matching.py and sampling.py work with languages directly; byte_matcher.py alone calls
an engine, llguidance with a token per byte. The public functions are `sgl.grammar`'s, which knows tokens too.
"""
