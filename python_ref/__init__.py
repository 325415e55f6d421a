"""The definitions: one short, pure PyTorch module per operation. Any device, any dtype, differentiable.

Every kernel of moe_kernels is verified against these; they import nothing from it.
"""
