"""Access to the machine and process that an engine runs in: threads, sockets, packages, the
terminal. Independent of models.
"""
