"""Tokenizers of model folders and GGUF files, and logs of the tokens in a growing prompt. Needs no
torch.
"""
