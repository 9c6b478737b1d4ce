"""Strategies with which an API can serve a node, best first: what each one needs, and which one is
chosen. Makes no calls.
"""
