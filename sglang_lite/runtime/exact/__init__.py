"""Draws texts with the model's own probabilities, computed from next-token distributions."""
