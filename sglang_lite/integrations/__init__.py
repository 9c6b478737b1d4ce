"""Engines of this process as models of other libraries. There is one file per library, loaded only
together with that library.
"""
