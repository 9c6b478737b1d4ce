"""What output may look like: regexes, schemas, grammars and Python types. Knows no tokens, no engine and no model.

Every constraint becomes a `Language` (nodes.py): a regex (regex.py), a schema (normal/), a grammar (ebnf.py, lark.py),
and what is made of them (compose.py). Engines are handed its text (to_lark.py, with lexemes that lexing.py proves);
matching.py, sampling.py and earley.py work with it directly. The public door is `sgl.grammar`, which knows engines too.
"""
