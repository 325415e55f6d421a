"""Inputs, call and least bytes of every operation, once for `verify`, bench and the fuzzer (tests/fuzz)."""
