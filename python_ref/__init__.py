"""The definitions: one short, pure PyTorch module per operation (harden calls scipy). Any device, any dtype.

Differentiable where the operation is. Every kernel of moe_kernels is verified against these; they import nothing of it.
"""
