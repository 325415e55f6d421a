"""The laboratory: systems of five papers on mixtures of experts, built from the library, which imports nothing of it.

`data` reads data sets, `models` are the networks, a file in `recipes` is an experiment, `train` runs recipes
(python -m moe_kernels train), `studies` are other experiments and tests of the papers' claims
(python -m moe_kernels study).
"""
