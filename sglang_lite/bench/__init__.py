"""`sglang-lite bench`: the runtime on a GPU with random weights of a real model's shape, and the physical limit."""
