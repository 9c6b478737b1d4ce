"""Attention on a GPU, a file a backend behind one interface. Knows the plan of a step, and no requests."""
