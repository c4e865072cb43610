"""The CUDA backend: kernels for one warp's lanes. Importing it starts no driver."""
