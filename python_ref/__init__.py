"""The definitions of the operations in PyTorch, for any device. They import nothing from moe_kernels."""
