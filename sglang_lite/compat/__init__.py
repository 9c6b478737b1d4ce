"""Compatibility with the names of other packages. Imported only by the modules at those packages' module paths."""
