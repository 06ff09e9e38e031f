"""Tests of KV compression."""
