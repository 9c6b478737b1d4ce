"""Stands for the package smg: as much of it as is told of workers, and hands requests on to the
first.
"""
