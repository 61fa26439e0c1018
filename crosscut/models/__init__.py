"""The reference models in plain PyTorch, and beside them, without torch, their sizes, shapes and dims tables."""
