"""The machine and process that an engine runs in: threads, sockets, packages, the terminal. Knows no model."""
