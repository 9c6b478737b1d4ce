"""Code of an engine's own process. The other modules of `engine` run in the user's process, except
for the connection between the two (frames.py, connection.py), which both use.
"""
