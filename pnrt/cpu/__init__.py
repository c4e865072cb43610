"""CPU kernels: numba with explicit SIMD, one set of algorithms with pnrt.cuda."""
