"""Constraints at run time: compiled off the event loop and matched token by token as token masks.
Independent of requests.
"""
