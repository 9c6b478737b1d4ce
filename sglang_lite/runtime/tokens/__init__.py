"""Tokenizers of folders and GGUF files, and growing texts as logs of tokens. Needs no torch."""
