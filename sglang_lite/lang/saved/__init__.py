"""Runs as data: in files, compared, and run again."""
