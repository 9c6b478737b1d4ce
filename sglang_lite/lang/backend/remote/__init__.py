"""Backends on providers' SDKs: what they have in common, whichever API they call."""
