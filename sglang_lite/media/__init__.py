"""Images, videos and sounds on their way to an engine: fetched from the web, and decoded from
files.
"""
