"""Analyses of the weights alone: composition, QK and OV circuits, copying, token paths."""
