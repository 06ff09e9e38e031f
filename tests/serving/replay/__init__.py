"""Tests of split replay."""
