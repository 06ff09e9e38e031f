"""Runs a TensorRT engine: K/V in pages on the device, states per row, copies beside the layers."""
