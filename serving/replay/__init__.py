"""Split replay: what calibration found, the records it stores, and the estimate that gates it."""
