"""Linear-attention state replay: chunked recurrences that start from any state."""
