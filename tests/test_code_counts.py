"""The package stays typed and plain. ``python -m tests.code_counts`` prints more."""

import ast

from tests import code_counts

EVERYTHING, ANY, PRIVATE, LONG = code_counts.counts().values()


def test_few_annotations_are_a_bare_any():
    assert len(ANY) <= 0.08 * len(EVERYTHING), ANY


def test_few_private_attributes_are_used_by_others():
    assert len(PRIVATE) <= 10, PRIVATE


def test_no_function_is_long():
    assert LONG == []


def test_each_kind_is_counted():
    tree = ast.parse(
        """
def f(x: Any, y: list[Any]) -> Any:
    "A docstring."
    z: int = self._own + other._private + record._replace().__class__
    def g():
        pass
"""
    )
    found = list(code_counts.annotations(tree))
    assert [ast.unparse(each) for each in found if code_counts.bare(each)] == [
        "Any"
    ] * 2
    assert len(found) == 4
    assert [x.attr for x in code_counts.private(tree)] == ["_private"]
    f, g = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert (code_counts.lines(f), code_counts.lines(g)) == (2, 2)
