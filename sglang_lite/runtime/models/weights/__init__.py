"""Where weights come from: one class per format, all answering `take(name)` in Hugging Face's names."""
