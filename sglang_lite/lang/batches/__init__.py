"""Running a program over many items."""
