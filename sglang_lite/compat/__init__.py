"""Compatibility with other packages. Imported by the modules at those packages' module paths, and lazily by name."""
