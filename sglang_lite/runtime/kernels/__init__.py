"""Kernels, one file each: in Triton for GPUs, in C++ for CPUs. They deal in plans and tensors, not
in models or requests.
"""
