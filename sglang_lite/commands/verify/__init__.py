"""`sglang-lite verify`: compares a model as it runs here with transformers' own code, and tries out
what programs do.
"""
