"""Specs, families and models known by name."""
