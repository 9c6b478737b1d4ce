"""Adapters that let other libraries use an engine of this process as their model. There is one file
per library, which is loaded only together with that library.
"""
