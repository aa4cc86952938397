"""Kernels in C++ and Triton behind the operations of kernels.py, and how they are built, packed and recorded."""
