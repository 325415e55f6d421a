"""The operations: a file for each, or for each family."""
