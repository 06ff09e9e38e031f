"""Attention over a KV slot: dense, or a bounded selection of it."""
