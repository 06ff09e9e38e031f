"""Serve a bundle: prefix cache, engine, Triton models."""
