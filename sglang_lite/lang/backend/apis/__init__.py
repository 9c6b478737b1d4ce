"""Request and response formats of providers' APIs, one file per API. These files build requests and
read responses, but make no calls.
"""
