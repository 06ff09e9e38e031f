"""Continuous batching over one compiled graph: prefill, replay and decode are the same graph."""
