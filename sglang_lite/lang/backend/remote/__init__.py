"""Code shared by all backends that use a provider's SDK, whichever API they call."""
