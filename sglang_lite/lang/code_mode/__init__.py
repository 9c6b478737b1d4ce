"""Code mode: the model writes a small program that calls the caller's functions."""
