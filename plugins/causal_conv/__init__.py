"""Short depthwise causal convolutions that carry their last inputs."""
