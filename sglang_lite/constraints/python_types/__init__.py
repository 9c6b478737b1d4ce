"""Python types as constraints: their texts, their schemas, and values read back. Knows no grammar and no engine."""
