"""Request and response formats of APIs, one file each: a question as a request, a response as
deltas. Makes no calls.
"""
