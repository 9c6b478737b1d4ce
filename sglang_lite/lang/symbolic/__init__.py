"""A body that ran with symbols: what stands for values that only a run has, and the graph that comes of it."""
