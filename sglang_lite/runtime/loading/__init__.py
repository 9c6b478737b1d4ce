"""Models by path: their files, their description, and loading. Independent of requests."""
