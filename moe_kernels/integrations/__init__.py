"""Models of the package transformers on the kernels of moe_kernels."""
