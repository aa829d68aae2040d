"""Analyses that need only weights: composition, QK and OV circuits, copying, token paths."""
