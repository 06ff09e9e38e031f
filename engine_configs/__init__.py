"""What the models are: specs, families, checkpoints by name, deployment values."""
