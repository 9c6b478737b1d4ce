"""Conversations of all chat protocols: messages become a prompt, and generated text becomes parts
of an answer.
"""
