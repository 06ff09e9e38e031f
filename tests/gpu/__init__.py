"""Tests of the GPU targets; none needs a GPU."""
