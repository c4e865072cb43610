"""Kernels and models under the clock. Nothing in pnrt imports it; README.md says how to run."""
