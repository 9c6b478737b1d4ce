"""Ollama's protocol: chats, generations and embeddings as lines of JSON, and information about
models.
"""
