"""Adapters that let other libraries use an engine of this process as their model. Each library has
its own file, which is loaded only if the library is used.
"""
