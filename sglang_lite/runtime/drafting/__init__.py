"""Drafts: guesses of a row's next tokens. The model then checks several of them in one step."""
