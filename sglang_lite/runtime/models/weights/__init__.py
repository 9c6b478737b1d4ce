"""Sources of weights, one class per file format, with a common method `take(name)` that uses Hugging Face tensor
names."""
