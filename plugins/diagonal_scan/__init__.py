"""Diagonal recurrences: every channel of the state decays by itself (Mamba-1, RG-LRU)."""
