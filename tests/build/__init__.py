"""Tests of build/."""
