"""Sources of weights: one class per file format, with a method `take(name)` that uses Hugging Face
tensor names.
"""
