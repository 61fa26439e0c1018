"""Guided tours: the collectives, and data, tensor and pipeline parallelism, run for real on small tensors."""
