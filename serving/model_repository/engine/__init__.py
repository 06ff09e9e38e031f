"""Triton model `engine`."""
