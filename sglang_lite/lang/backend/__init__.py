"""Backends: implementations that generate text for programs."""
