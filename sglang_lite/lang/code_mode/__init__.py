"""Code mode: the model writes a small program over the caller's functions."""
