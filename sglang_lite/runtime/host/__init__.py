"""The machine and process an engine runs in: threads, sockets, packages, the terminal. Independent
of models.
"""
