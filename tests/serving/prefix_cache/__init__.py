"""Tests of the prefix cache."""
