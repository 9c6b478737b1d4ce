"""Multiple devices: the layout of an engine's ranks, and what they compute together. Independent of
requests and models.
"""
