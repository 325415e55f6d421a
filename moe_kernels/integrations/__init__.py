"""Models of other packages on the kernels of this one. Each file imports its library itself; nothing imports these."""
