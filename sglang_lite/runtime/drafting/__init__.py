"""Drafts: guesses of the tokens that come next in a row, which the model then checks several at a time."""
