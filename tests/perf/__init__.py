"""Tests of perf/."""
