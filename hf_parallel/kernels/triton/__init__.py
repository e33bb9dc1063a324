"""The Triton backend of block attention: kernels, their launches, and the functions that `dispatch` calls."""
