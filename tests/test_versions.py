"""One place says which versions are supported, and one module bridges them."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = dict(line.split(">=") for line in PROJECT["dependencies"])
ASKS = re.compile(r"\b(?:jax|optax)\.__version|attr\(\s*(?:jax|optax)\b")


def test_one_page_names_the_floors():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    said = {
        page.name: {*re.findall(r"\b(jax|optax) ≥ ([\d.]*\d)", page.read_text())}
        for page in pages
    }
    floors = {(name, FLOORS[name]) for name in ("jax", "optax")}
    assert {page: found for page, found in said.items() if found} == {
        "install.md": floors
    }


@pytest.mark.parametrize("page", ["README.md", "docs/versions.md"])
def test_pages_name_the_oldest_flax_that_demo_and_notebooks_take(page):
    extras = PROJECT["optional-dependencies"]
    lines = {x for name in ("demo", "notebooks") for x in extras[name] if "flax" in x}
    said = re.findall(r"\bFlax ≥ ([\d.]*\d)", (ROOT / page).read_text())
    assert {f"flax>={floor}" for floor in said} == lines


def test_one_module_asks_which_version_runs():
    package = ROOT / "gradxform"
    modules = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if ASKS.search(path.read_text())
    }
    assert modules == {"_jax/versions.py"}


def test_the_floors_and_every_python_are_in_the_table():
    table = (ROOT / "docs/versions.md").read_text()
    tested = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \|", table, re.M)
    assert (FLOORS["jax"], FLOORS["optax"]) in {row[1:] for row in tested}
    pythons = re.findall(r":: (3\.\d+)", str(PROJECT["classifiers"]))
    assert set(pythons) == {row[0] for row in tested}
    assert PROJECT["requires-python"] == f">={pythons[0]}"
