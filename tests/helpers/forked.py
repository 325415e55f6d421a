"""Programs that need an interpreter of their own, but may share its imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Output comes in the order of the programs, as each is waited for.
_RUN = """
import gc, json, os, sys, traceback
shared, *programs = json.loads(sys.stdin.read())
gc.disable()
exec(shared, {"__name__": "__main__"})
gc.freeze()  # otherwise a collection in a fork copies the memory of all imports
gc.enable()
for program in programs:
    print(end="\\0", flush=True)
    child = os.fork()
    if child == 0:
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


def outputs(shared: str, programs: Sequence[str], **options: Any) -> list[str]:
    """What each program prints, and the traceback of an error that ends it.

    A new process runs `shared`, such as an import of torch, for 2 s of processor time. Each program then runs in a
    fork of it. options: those of subprocess.run.
    """
    given = json.dumps([shared, *programs])
    done = subprocess.run([sys.executable, "-c", _RUN], input=given, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    first, *found = done.stdout.split("\0")
    assert (first, len(found)) == ("", len(programs)), done.stdout
    return found
