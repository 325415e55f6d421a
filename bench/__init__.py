"""python -m bench: times every operation beside other implementations (peers), and reports the results."""
