"""Adapters of an engine: which are loaded, and which requests hold one on the device."""
