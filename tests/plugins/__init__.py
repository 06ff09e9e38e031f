"""Tests of plugins/."""
