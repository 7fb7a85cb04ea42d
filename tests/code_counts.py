"""How plain the package is, in numbers: ``python -m tests.code_counts`` prints them.

It counts annotations that are a bare ``Any``, uses of another object's private
attributes, and functions of more than 60 lines. Docstrings do not count as lines, and
neither does a function inside of another one. ``--list`` says where each of them is.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
from collections.abc import Iterator

import gradxform as gx

PACKAGE = pathlib.Path(gx.__file__).parent
LONG = 60
# Of a named tuple these are public.
PUBLIC = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """The types of arguments, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, Function) and node.returns is not None:
            yield node.returns


def bare(annotation: ast.expr) -> bool:
    """Whether it is ``Any`` and nothing else."""
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def private(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Private attributes of other objects than ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in PUBLIC:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr.startswith("_") and not node.attr.startswith("__") and not own:
                yield node


def lines(function: Function) -> int:
    """The lines of a function, without its docstring and the functions in it."""
    within = [node for node in ast.walk(function) if node is not function]
    inner = [node for node in within if isinstance(node, Function)]
    inside = {n for f in inner for n in range(f.lineno, f.end_lineno + 1)}
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        inside |= {*range(first.lineno, first.end_lineno + 1)}
    return len({*range(function.lineno, function.end_lineno + 1)} - inside)


def functions(tree: ast.AST) -> Iterator[Function]:
    """The functions of more than ``LONG`` lines."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and lines(node) > LONG:
            yield node


def counts() -> dict[str, list[str]]:
    """The places of each kind; ``annotations`` has all of them."""
    found: dict[str, list[str]] = {
        "annotations": [],
        "bare Any": [],
        "private attributes of others": [],
        f"functions of more than {LONG} lines": [],
    }
    everything, any_, privates, long = found.values()
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), path.relative_to(PACKAGE)
        for annotation in annotations(tree):
            everything.append(f"{name}:{annotation.lineno}")
            if bare(annotation):
                any_.append(everything[-1])
        privates += [f"{name}:{x.lineno} {ast.unparse(x)}" for x in private(tree)]
        long += [f"{name}:{f.lineno} {f.name}, {lines(f)}" for f in functions(tree)]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="say where they are")
    where, everything = parser.parse_args().list, None
    for kind, places in counts().items():
        everything = everything or len(places)
        share = f" ({len(places) / everything:.1%})" if kind == "bare Any" else ""
        print(f"{len(places)} {kind}{share}")
        if where and len(places) < everything:
            print(*(f"  {place}" for place in places), sep="\n")
