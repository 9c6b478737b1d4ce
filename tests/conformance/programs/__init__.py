"""One program a file. Each ends in `CASE`: case.py says what that holds."""
