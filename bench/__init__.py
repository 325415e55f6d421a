"""python -m bench: times the operations beside other implementations (peers), and reports the results."""
