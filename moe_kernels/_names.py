"""Names that a copy of this package under another name has of its own (release/hub.py makes one)."""

OPERATORS = "moe_kernels"  # torch.ops.moe_kernels has the operators
DEFINITIONS = "python_ref"  # the package of the definitions
