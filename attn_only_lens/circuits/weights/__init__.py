"""Analyze circuits from weights alone: composition, QK and OV circuits, copying."""
