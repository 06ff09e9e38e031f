"""Trains the tiny hybrids in ``engine_configs/``: ``python -m perf.train_tiny``."""
