"""Whole training steps, crosscut's beside stock PyTorch's: the same model, data, optimizer and back end."""
