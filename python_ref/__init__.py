"""The definitions of the operations in PyTorch (harden: scipy), for any device."""
