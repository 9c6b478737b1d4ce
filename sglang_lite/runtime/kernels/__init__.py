"""Kernels, a file each: in Triton for GPUs, in C++ for CPUs. Know plans and tensors, but no models and no requests."""
