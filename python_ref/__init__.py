"""The definitions of the operations in PyTorch (harden: scipy), for any device. They import nothing from moe_kernels."""
