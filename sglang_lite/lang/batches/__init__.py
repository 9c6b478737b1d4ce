"""Batches: runs of one program over many items."""
