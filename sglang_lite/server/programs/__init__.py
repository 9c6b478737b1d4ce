"""Protocol of this package: whole programs, and the rows of compiled ones."""
