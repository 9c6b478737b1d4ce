"""Backends on providers' SDKs: what they share, whichever API they call."""
