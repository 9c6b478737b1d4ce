"""Protocol of this package: whole programs, and rows of compiled programs."""
