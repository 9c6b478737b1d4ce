"""The code of an engine's own process. The rest of `engine` runs in the user's, but for the line between the two
(frames.py, connection.py)."""
