"""How long a process takes that imports gradxform, and one that imports optax alone.

``python -m benchmarks.imports``. JAX is most of both. After optax, the package itself
takes 7 ms; a full garbage collection of JAX's objects then falls due in it.
"""

import os
import subprocess
import sys

from benchmarks.measure import arguments, interleaved, report, times


def importing(package):
    """A run of a process that imports this and nothing else, compiled before."""
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
