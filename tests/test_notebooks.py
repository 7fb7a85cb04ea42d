"""Every notebook runs from top to bottom, and holds the outputs of such a run."""

import ast
import functools
import importlib.metadata
import pathlib
import re
import sys
import tomllib

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import xla_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
distributions = functools.cache(importlib.metadata.packages_distributions)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A path on somebody's machine: "/home/...", "C:\\Users\\...", but no part of a URL.
LOCAL_PATH = re.compile(
    r"(?<![\w./:-])/(?:tmp|root|work|home|Users|usr|opt|var|private|mnt|content)\b"
    r"|\b[A-Za-z]:\\+\w",
)


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the running interpreter, whatever kernels are installed."""

    @property
    def kernel_spec(self):
        argv = [
            sys.executable,
            "-Xfrozen_modules=off",
            *("-m", "ipykernel_launcher", "-f", "{connection_file}"),
        ]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def read(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook


def execute(notebook, folder):
    """Runs a notebook in a folder, in place; raises what its first bad cell raised."""
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        kernel_manager_class=ThisInterpreter,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def errors(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in outputs if output.output_type == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The warnings of Jupyter's machinery are not about the notebook.
@pytest.mark.filterwarnings("default")
def test_notebook_runs(path, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("XLA_FLAGS", xla_flags(level=1))
    folder = tmp_path / "run"
    folder.mkdir()
    notebook = read(path)
    execute(notebook, folder)
    assert not errors(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_the_outputs_of_one_run(path):
    notebook = read(path)
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    assert not errors(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < 500_000


@functools.cache
def installed_by(extras):
    """What pip installs with these extras of the project, by canonical names."""
    wanted = [*PROJECT["dependencies"], f"gradxform[{extras}]"]
    found = {"gradxform", "ipython"}  # Jupyter is there already.
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name == "gradxform":
            for extra in requirement.extras:
                wanted += PROJECT["optional-dependencies"][extra]
        elif name not in found:
            found.add(name)
            lines = map(Requirement, importlib.metadata.requires(name) or ())
            wanted += [str(x) for x in lines if not x.marker]
    return found


@pytest.mark.every
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_installs_what_it_imports(path):
    code = "\n".join(cell.source for cell in code_cells(read(path)))
    (extras,) = re.findall(r"%pip install -q \"gradxform\[(.*)\] @ git\S*\"\n", code)
    imported = set()
    for node in ast.walk(ast.parse(re.sub(r"(?m)^( *)%.*$", r"\1pass", code))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    installed, known = installed_by(extras), distributions()
    for module in imported - sys.stdlib_module_names - {"gradxform"}:
        assert any(canonicalize_name(x) in installed for x in known[module]), module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_names_no_path_of_the_machine_it_ran_on(path):
    notebook = read(path)
    for cell in notebook.cells:
        cell.source = ""
        for output in cell.get("outputs", []):
            for picture in ("image/png", "image/jpeg"):
                output.get("data", {}).pop(picture, None)
    written = re.sub(r"\\[nt]", " ", nbformat.writes(notebook, nbformat.NO_CONVERT))
    assert not LOCAL_PATH.findall(written)
