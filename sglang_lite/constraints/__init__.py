"""What output may look like: the regex dialect, schemas and Python types. Knows no tokens, no engine and no model."""
