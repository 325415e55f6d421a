"""python -m bench: measures every operation beside its peers and this machine's ceilings, and reports the results."""
