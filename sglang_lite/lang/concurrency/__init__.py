"""Concurrency without knowledge of programs: the executor loop, pools of threads for blocking work,
and values and text streams that any number of readers can wait for.
"""
