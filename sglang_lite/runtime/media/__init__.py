"""Images, videos and sounds: their places in a prompt, their preparation for a model's encoder, and
the store of its features.
"""
