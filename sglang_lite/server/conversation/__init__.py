"""Conversations of all chat protocols: messages become a prompt, generated text becomes parts of an answer."""
