"""The language: programs, the nodes they are made of, and what executes them. No torch, no runtime, no SDK."""
