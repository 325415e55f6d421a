"""python -m bench: every operation against its peers and the machine's own ceilings; keeps and shows the results."""
