"""Prepares images, videos and sounds for an engine: fetches them from the web, and decodes files."""
