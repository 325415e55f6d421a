"""Models of the package transformers on the kernels of moe_kernels, which does not import these modules by itself."""
