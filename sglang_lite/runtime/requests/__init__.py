"""Requests of the engine: parameters, progress, output, and their programs. The scheduler queues
them.
"""
