"""Compatibility with other packages. Imported by the modules at those packages' paths, and lazily
by name.
"""
