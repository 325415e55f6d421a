"""Models of the package transformers on the kernels of moe_kernels; `import moe_kernels` does not import them."""
