"""The operations: one file each, readable from top to bottom."""
