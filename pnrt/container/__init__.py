"""Containers of weights: GGUF and cyb's .model."""
