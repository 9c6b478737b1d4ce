"""Text around the user's own: chat templates, reasoning marks, tool calls and stop matching.
Doesn't depend on tokens or models.
"""
