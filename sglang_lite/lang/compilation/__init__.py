"""A program compiled: its body run with symbols, recorded, and played as a whole for the values of each run."""
