"""Every family against transformers on tiny random models."""
