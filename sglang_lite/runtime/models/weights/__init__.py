"""Sources of weights: one class per format, all answering `take(name)` in Hugging Face's names."""
