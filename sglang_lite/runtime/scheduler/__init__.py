"""Chooses which requests run, and what each step computes. Independent of models, texts and
threads.
"""
