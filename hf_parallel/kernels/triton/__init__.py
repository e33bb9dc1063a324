"""Triton backend of block attention: kernels, their launches, and the functions called by `dispatch`."""
