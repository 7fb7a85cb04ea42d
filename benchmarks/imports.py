"""The time of a process that imports gradxform, and of one that imports only optax.

``python -m benchmarks.imports``. JAX takes most of both. After optax, the package
itself takes 7 ms, with a full garbage collection of JAX's objects that comes at that
time.
"""

import os
import subprocess
import sys

from benchmarks.measure import arguments, interleaved, report, times


def importing(package):
    """A run of a process that imports this module alone; its bytecode is there."""
    compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return lambda: subprocess.run(
        [sys.executable, "-c", f"import {package}"], check=True, env=compiled
    )


def main():
    """Prints the table."""
    options = arguments(__doc__, rounds=20).parse_args()
    runs = {name: importing(name) for name in ("optax", "gradxform")}
    seconds = interleaved(runs, options.rounds)
    rows = [{"name": name, **times(s, seconds["optax"])} for name, s in seconds.items()]
    report("a process that imports", rows, options.json)


if __name__ == "__main__":
    main()
