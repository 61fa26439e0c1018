"""Proof that a layout computes the step of one device."""
