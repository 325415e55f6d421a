"""The definitions: one PyTorch module per operation, for any device (harden calls scipy on the CPU).

Kernels of moe_kernels are verified against these modules, which import no other module of the project.
"""
