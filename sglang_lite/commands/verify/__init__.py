"""`sglang-lite verify`: compares what a model computes here with transformers' own code, and tries
out small programs.
"""
