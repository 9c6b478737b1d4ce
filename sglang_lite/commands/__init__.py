"""Commands of `sglang-lite` that need more than a call, one file each."""
