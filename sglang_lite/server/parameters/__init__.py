"""Fields of requests that become sampling parameters and constraints, for all protocols."""
