"""Run a Triton server: start, watch, restart, stop, leave nothing behind."""
