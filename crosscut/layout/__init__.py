"""Layouts and derivation: pure data and arithmetic. Nothing here imports torch."""
