"""The language: programs, the nodes they are made of, and their execution. Importing it loads
neither torch nor the runtime nor any provider's SDK.
"""
