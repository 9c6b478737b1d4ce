"""Text around the user's own: chat templates, reasoning marks, tool calls, and stop matching.
Independent of tokens and models.
"""
