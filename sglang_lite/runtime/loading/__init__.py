"""Loads models from paths: their files, their description, and their weights. Independent of
requests.
"""
