"""Requests of the engine: parameters, progress, output, and hints of their programs. The scheduler queues them."""
