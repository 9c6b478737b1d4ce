"""The only representation of a program: its nodes, and the ways to choose. Knows nothing of who writes or plays it."""
