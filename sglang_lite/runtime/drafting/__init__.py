"""Drafts: guesses of a row's next tokens, which the model then checks several at a time."""
