"""Tokenizers of folders and GGUF files, and texts as logs of tokens. Needs no torch."""
