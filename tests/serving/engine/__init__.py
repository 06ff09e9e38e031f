"""Tests of serving/engine/."""
