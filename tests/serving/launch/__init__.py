"""The launcher with the real Triton server."""
