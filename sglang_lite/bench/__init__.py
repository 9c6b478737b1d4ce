"""`sglang-lite bench`: the runtime on a GPU with random weights of a real shape, the physical limit, and peers."""
