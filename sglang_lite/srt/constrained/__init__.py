"""Where SGLang's users import a few names of its server from. Nothing lives here."""
