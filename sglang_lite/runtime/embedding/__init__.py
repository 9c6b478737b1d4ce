"""Models that read whole texts and return numbers: embeddings, scores of pairs, classes. They have
no KV cache.
"""
