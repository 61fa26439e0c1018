"""Checked mode: before data move, the ranks of a group compare their calls (docs/checked.md)."""
