"""Importing the package loads optax and what a training needs, and nothing else."""

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


LATER = """
import pickle, sys, gradxform
for name in ("ParameterServer", "PushResult", "ServerClosedError", "ServerStats"):
    assert name in dir(gradxform) and name in gradxform.__all__
assert not hasattr(gradxform, "ParameterSever")
print(*(m for m in sys.modules if m.startswith("gradxform.")))
from gradxform import ParameterServer
assert pickle.loads(pickle.dumps(ParameterServer)) is gradxform.ParameterServer
assert "gradxform.engines" not in sys.modules
assert gradxform.engines.Job is sys.modules["gradxform.engines"].Job
exec("from gradxform import *")
assert ServerStats is gradxform.ServerStats and engines is gradxform.engines
"""


def test_server_and_engines_are_imported_when_they_are_used():
    output = subprocess.run(
        [sys.executable, "-c", LATER], check=True, capture_output=True, text=True
    ).stdout
    parts = {name.split(".")[1] for name in output.split()}
    inside = {"_config", "_late", "_rows", "_training", "_transforms", "_trees"}
    assert parts == inside
