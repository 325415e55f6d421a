"""python -m bench: times every operation beside other implementations (peers), and reports the results.

Times are also compared with this machine's ceilings: the measured speeds of a copy and of a matrix product.
"""
