"""Requests of the engine: their parameters, progress, output and hints. Knows no queue, slot or step."""
