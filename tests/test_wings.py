"""A wing imports those wings alone that stand above it."""

import ast
import pathlib

import pytest

import gradxform as gx

PACKAGE = pathlib.Path(gx.__file__).parent

# Who may import whom; a wing's own rooms may import each other. "" is the public face.
MAY_IMPORT = {
    "_trees": set(),
    "_transforms": {"_trees"},
    "_late": {"_trees"},
    "_verbs": {"_trees", "_late"},
    "_server": {"", "_trees", "_transforms", "_late", "_verbs"},
    "engines": {"", "_trees", "_transforms", "_late", "_verbs", "_server"},
    "_config": {"", "_trees"},
}


def imported_wings(path):
    """The wings from which a file imports; ``""`` where it imports the face."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            if module.partition(".")[0] == "gradxform":
                _, wing, *_ = [*module.split("."), ""]
                yield wing if wing in MAY_IMPORT else ""


def test_the_table_has_every_wing():
    assert {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} == {
        *MAY_IMPORT
    }


@pytest.mark.parametrize("wing", MAY_IMPORT)
def test_a_wing_imports_those_above_it(wing):
    imports = {
        w for path in (PACKAGE / wing).glob("*.py") for w in imported_wings(path)
    }
    assert imports <= MAY_IMPORT[wing] | {wing}


@pytest.mark.parametrize("wing", MAY_IMPORT)
def test_a_wing_says_what_lives_there(wing):
    doc = ast.get_docstring(ast.parse((PACKAGE / wing / "__init__.py").read_text()))
    rooms = {path.stem for path in (PACKAGE / wing).glob("*.py")} - {"__init__"}
    assert all(f"``{room}" in doc for room in rooms)


def test_no_file_is_long():
    assert all(len(p.read_text().splitlines()) <= 410 for p in PACKAGE.rglob("*.py"))
