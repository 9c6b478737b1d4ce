"""OpenAI's protocols: chat completions, completions, responses, decisions and embeddings; with
scores, reranking and pooling.
"""
