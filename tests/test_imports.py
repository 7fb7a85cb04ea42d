"""Importing the package loads optax and the package, and nothing else."""

import subprocess
import sys

PROGRAM = """
import sys, optax
before = set(sys.modules)
import gradxform
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""


def test_import_loads_nothing_beyond_optax():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    assert set(output.split()) - sys.stdlib_module_names == {"gradxform"}
