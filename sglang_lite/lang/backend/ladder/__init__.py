"""Ways in which an API can serve a node, best first: what each needs, and which one is chosen.
Makes no calls.
"""
