"""`sglang-lite bench`: measures the runtime with random weights in a real model's shape, and
compares it with the hardware's limit and with peers (vllm, sglang).
"""
