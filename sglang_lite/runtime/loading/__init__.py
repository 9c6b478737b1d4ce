"""Models by their path: their files, their description, and loading. Knows no request."""
