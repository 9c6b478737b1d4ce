"""Protocol of this package: whole programs."""
