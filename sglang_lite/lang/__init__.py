"""The language: programs, the nodes they consist of, and their execution. Imports neither torch nor
the runtime nor any provider's SDK.
"""
