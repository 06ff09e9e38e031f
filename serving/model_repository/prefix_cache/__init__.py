"""Triton model `prefix_cache`."""
