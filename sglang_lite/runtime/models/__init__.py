"""Models: the specification in a checkpoint's config, the table of its parameters, and decoders. Knows no requests."""
