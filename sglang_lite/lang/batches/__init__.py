"""Execution of a program over many items."""
