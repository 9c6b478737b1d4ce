"""Engines of this process as models of other libraries: a file a library, each loaded only with its
library.
"""
