"""The normaliser: a JSON schema as an exact language, or an error that names what can't be one."""
