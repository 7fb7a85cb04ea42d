"""A wing imports only the wings that stand above it."""

import ast
import graphlib
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
    "_server": {"_trees", "_transforms", "_late", "_verbs"},
    "engines": {"_trees", "_transforms", "_late", "_verbs", "_server"},
    "_config": {"", "_trees"},
    "_demo": {"", "_server", "engines"},
}


def imported(path):
    """What a file imports of the package, anywhere in it, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (n for n in names if n.partition(".")[0] == PACKAGE.name)


def imported_wings(path):
    """The wings from which a file imports; ``""`` where it imports the face."""
    for name in imported(path):
        _, wing, *_ = [*name.split("."), ""]
        yield wing if wing in MAY_IMPORT else ""


def test_the_table_has_every_wing():
    assert {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} == {
        *MAY_IMPORT
    }


@pytest.mark.parametrize("wing", MAY_IMPORT)
def test_a_wing_imports_only_wings_above_it(wing):
    imports = {
        w for path in (PACKAGE / wing).glob("*.py") for w in imported_wings(path)
    }
    assert imports <= MAY_IMPORT[wing] | {wing}


@pytest.mark.parametrize("wing", MAY_IMPORT)
def test_a_wing_says_what_lives_there(wing):
    doc = ast.get_docstring(ast.parse((PACKAGE / wing / "__init__.py").read_text()))
    rooms = {path.stem for path in (PACKAGE / wing).glob("*.py")} - {"__init__"}
    if wing == "_transforms":  # There a module has the name of its transformation.
        rooms -= {*vars(gx)}
    assert all(f"``{room}" in doc for room in rooms)


def test_no_room_imports_itself_by_way_of_others():
    rooms = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__"  # A face names its rooms, and imports nothing else.
    }
    graph = graphlib.TopologicalSorter()
    for room, path in rooms.items():
        names = {*imported(path)}  # Of rooms, and of names in them.
        names |= {name.rpartition(".")[0] for name in names}
        graph.add(room, *names & rooms.keys())
    graph.prepare()  # Raises a CycleError, which names the rooms.


def test_only_the_face_and_the_main_job_stand_beside_the_wings():
    assert {p.name for p in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
