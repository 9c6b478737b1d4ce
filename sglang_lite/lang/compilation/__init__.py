"""Compilation of programs: a body is run with symbols and recorded, and runs play the record with their own values."""
