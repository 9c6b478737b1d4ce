"""Concurrency tools that know nothing about programs: the executor loop, thread pools for blocking
work, and values and text streams that any number of readers can wait for.
"""
