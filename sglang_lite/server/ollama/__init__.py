"""Ollama's protocol: chats, generations and embeddings as lines of JSON, and what its clients ask about models."""
