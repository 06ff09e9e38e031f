"""Benchmarks: each runs as ``python -m perf.<name>`` and prints one table."""
