"""Kernels and models under the clock, beside llama.cpp; see README.md here."""
