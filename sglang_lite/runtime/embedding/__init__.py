"""Models that read a text whole and give numbers: embeddings, scores of pairs, classes. They have no cache."""
