"""Triton models: copied into a bundle by the conversion."""
