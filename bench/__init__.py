"""python -m bench: times the operations beside other implementations (peers), and reports the results."""

import importlib.util
import sys

if sys.argv[:1] == ["-m"]:  # `python -m bench` imports this first
    for _name in ("typer", "rich", "matplotlib", "markdown_it"):
        if importlib.util.find_spec(_name) is None:
            sys.exit(f"bench: {_name} is not installed: pip install -e '.[bench]' in the checkout")
