"""Runs as data: stored in files, compared, and repeated."""
