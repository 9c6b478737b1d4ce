"""Commands of `sglang-lite` that are more than a call: each a file."""
