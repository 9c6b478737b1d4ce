"""Many devices: the layout of an engine's ranks, and what they compute together. Knows no requests and no models."""
