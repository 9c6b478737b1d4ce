"""Backends, which programs run on."""
