"""What goes into Triton's model directory."""
