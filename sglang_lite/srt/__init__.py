"""A few names of SGLang's server, for its users to import. Nothing lives here."""
