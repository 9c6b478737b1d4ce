"""Our own protocol: whole programs, and the rows of compiled ones."""
