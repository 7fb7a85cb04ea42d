"""Importing the package loads optax and what a training needs, and nothing else."""

import subprocess
import sys

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
assert "gradxform.engines" not in sys.modules
assert gradxform.engines.Job is sys.modules["gradxform.engines"].Job
exec("from gradxform import *")
assert ServerStats is gradxform.ServerStats and engines is gradxform.engines
"""


def test_server_and_engines_are_imported_when_they_are_used():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    loaded, own = (line.split() for line in output.splitlines())
    assert {*loaded} - sys.stdlib_module_names == {"gradxform"}
    parts = {name.split(".")[1] for name in own}
    assert parts == {"_config", "_late", "_rows", "_training", "_transforms", "_trees"}


def test_two_threads_may_be_the_first_to_need_a_module_of_jax():
    # While one thread still imports the rest of jax.extend, its core is already there.
    program = """
import concurrent.futures, importlib.abc, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "jax.extend.source_info_util":
            time.sleep(1.0)

sys.meta_path.insert(0, Slow())
from gradxform._trees import versions
assert "jax.extend" not in sys.modules
with concurrent.futures.ThreadPoolExecutor(2) as threads:
    first = threads.submit(versions.is_outside)
    while not hasattr(sys.modules.get("jax.extend"), "core"):
        time.sleep(0.01)
    assert not first.done()
    assert threads.submit(versions.is_outside).result() and first.result()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
