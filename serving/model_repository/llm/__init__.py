"""Triton model `llm`."""
