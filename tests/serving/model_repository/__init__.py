"""The Triton models on a small fake of the server's Python API."""
