"""The public operations, one file for each operation or family."""
