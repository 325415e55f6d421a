"""Models of other packages on the kernels of this one. Each module imports its package; import them explicitly."""
