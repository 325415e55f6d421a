"""The definitions of the operations in PyTorch, for any device. They import no other module of the project."""
