"""Formal languages: character sets, nodes, grammars, automata, an Earley parser. Knows no syntax and no engine."""
