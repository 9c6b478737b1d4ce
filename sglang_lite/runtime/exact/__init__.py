"""Draws of texts with the model's own probabilities, from the distributions of next tokens."""
