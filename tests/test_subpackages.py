"""A subpackage imports only the subpackages that stand above it."""

import ast
import graphlib
import pathlib
import re

import pytest

import gradxform as gx
from gradxform._jax import programs

PACKAGE = pathlib.Path(gx.__file__).parent

DOCS = PACKAGE.parent / "docs"
PAGE, EVALUATOR = DOCS / "design.md", DOCS / "evaluator.md"
# The pages for those who change the package, and a number of paths on each.
NAMING_PATHS = {"design": 20, "adding": 30, "evaluator": 15, "serving": 10}
NAME = re.compile(r"`(\w+)/?`")


def table():
    """Who may import whom, as the page says it; "" is the public API."""
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    found = {}
    for name, words in rows:
        named = set(NAME.findall(words)) | (
            {""} if "the public API" in words else set()
        )
        found[name] = found.keys() - named if "all above" in words else named
    return found


MAY_IMPORT = table()


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


def imported_subpackages(path):
    """The subpackages from which a file imports; ``""`` is the public API."""
    for name in imported(path):
        _, subpackage, *_ = [*name.split("."), ""]
        yield subpackage if subpackage in MAY_IMPORT else ""


def test_the_table_has_every_subpackage():
    assert {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} == {
        *MAY_IMPORT
    }


@pytest.mark.parametrize("subpackage", MAY_IMPORT)
def test_a_subpackage_imports_only_those_above_it(subpackage):
    imports = {
        w
        for path in (PACKAGE / subpackage).glob("*.py")
        if path != PACKAGE / "engines" / "__init__.py"
        for w in imported_subpackages(path)
    }
    assert imports <= MAY_IMPORT[subpackage] | {subpackage}


def test_the_public_engines_are_those_of_two_subpackages():
    """Their names are part of the public API, so they stand in one module."""
    public = imported_subpackages(PACKAGE / "engines" / "__init__.py")
    assert {*public} == {"engines", "_ray", "_server"}


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others():
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__"  # It names its modules, and imports nothing else.
    }
    graph = graphlib.TopologicalSorter()
    for module, path in modules.items():
        names = {*imported(path)}  # Of modules, and of names in them.
        names |= {name.rpartition(".")[0] for name in names}
        graph.add(module, *names & modules.keys())
    graph.prepare()  # Raises a CycleError, which names the modules.


def test_only_the_public_api_and_the_main_job_stand_beside_the_subpackages():
    assert {p.name for p in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("page", NAMING_PATHS)
def test_each_path_on_a_page_exists(page):
    """But for those of a recipe, whose transformation is called x."""
    text = (DOCS / f"{page}.md").read_text()
    named = re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.(?:py|md))`", text)
    folders = [PACKAGE.parent, PACKAGE, DOCS]
    there = {path.name for folder in folders[1:] for path in folder.rglob("*")}
    missing = {
        x
        for x in named
        if x not in there and not any((folder / x).exists() for folder in folders)
    }
    assert len(named) > NAMING_PATHS[page]
    assert {x for x in missing if not x.endswith(("/x.py", "_x.py"))} == set()


@pytest.mark.parametrize("page", NAMING_PATHS)
def test_each_member_on_a_page_exists(page):
    """Names such as ``Core.commit``, of a class in the package or of its base."""
    text = (DOCS / f"{page}.md").read_text()
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    missing = [
        f"{kind}.{member}"
        for kind, member in re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)`", text)
        if not re.search(rf"^class {kind}\b", source, re.M)
        or not re.search(rf"^    (def )?{member}\b", source, re.M)
    ]
    assert missing == []


def test_the_page_has_each_operation_that_runs_programs_inside():
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|", EVALUATOR.read_text(), re.MULTILINE
    )
    named = [name for row in rows for name in NAME.findall(row)]
    assert sorted(named) == sorted(programs.OPERATIONS)
