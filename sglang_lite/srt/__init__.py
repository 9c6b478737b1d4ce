"""Module paths of SGLang's server: re-exports of a few names that SGLang's users import."""
