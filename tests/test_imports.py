"""Importing the package loads optax and what a training needs, and nothing else."""

import subprocess
import sys

import pytest

PROGRAM = """
import pickle, sys, optax
before = set(sys.modules)
import gradxform
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before}))
for name in ("ParameterServer", "PushResult", "ServerClosedError", "ServerStats"):
    assert name in dir(gradxform) and name in gradxform.__all__
assert not hasattr(gradxform, "ParameterSever")
print(*(m for m in sys.modules if m.startswith("gradxform.")))
from gradxform import ParameterServer
assert pickle.loads(pickle.dumps(ParameterServer)) is gradxform.ParameterServer
assert not {"gradxform.engines", "gradxform.contrib"} & {*sys.modules}
assert gradxform.engines.Job is sys.modules["gradxform.engines"].Job
assert gradxform.contrib is sys.modules["gradxform.contrib"]
exec("from gradxform import *")
assert ServerStats is gradxform.ServerStats and engines is gradxform.engines
"""


@pytest.mark.slow
def test_server_and_engines_are_imported_when_they_are_used():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    loaded, own = (line.split() for line in output.splitlines())
    assert {*loaded} - sys.stdlib_module_names == {"gradxform"}
    parts = {name.split(".")[1] for name in own}
    assert parts == {
        *("_trees", "_jax", "_checks", "_devices", "_numbers", "_slices"),
        *("_rows", "_transforms", "_gates"),
        *("_matrices", "_layers", "_steps", "_config"),
    }
