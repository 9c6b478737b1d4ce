"""Formal languages: character sets, nodes, grammars, automata, an Earley parser. Independent of syntax and engines."""
