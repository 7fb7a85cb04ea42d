"""The faults that are built in, and which tests run first."""

import sys

import pytest

from tests import lines, mutations

SOURCE = b"""\
LIMIT = 3
def clip(x, most=LIMIT):
    if x > most: return float(float(x))
    x += 1
    return min(
        x, - -most)
"""


def faults():
    """The faults of the source, by line and by what is there instead."""
    return {(x.line, x.after): x for x in mutations.mutations("clip.py", SOURCE)}


def test_each_fault_is_another_program():
    found = faults()
    assert set(found) == {
        (1, "4"),
        (3, "True"),
        (3, "False"),
        (3, "x >= most"),
        (3, "(float(x))"),  # As without the inner call.
        (4, "pass"),
        (4, "2"),
        (5, "(x)"),
        (6, "(-most)"),
    }
    assert found[6, "(-most)"].of(SOURCE) == SOURCE.replace(b"- -most", b"(-most)")
    programs = {x.of(SOURCE) for x in found.values()}
    assert len(programs) == len(found)
    assert SOURCE not in programs


def test_tests_that_run_the_line_come_first():
    module = "clip.py"
    runs = {
        "": lines.Run(9.0, {module: {1, 2}}),
        "dear::first": lines.Run(2.0, {module: {3, 4, 5}}),
        "cheap::second": lines.Run(0.7, {module: {3, 4, 5}}),
        "cheap::first": lines.Run(0.1, {module: {5}}),
        "cheap::above": lines.Run(0.5, {module: {3}}),
        "dear::elsewhere": lines.Run(0.1, {"other.py": {5}}),
    }
    found = faults()
    assert mutations.nearest(runs, found[3, "True"]) == [
        "cheap::second",
        "cheap::above",
        "dear::first",
    ]
    # The tests of a file keep their order.
    at_the_end = ["cheap::second", "cheap::first", "dear::first"]
    assert mutations.nearest(runs, found[6, "(-most)"]) == at_the_end
    # Each file imports a constant.
    all_of_them = ["cheap::second", "cheap::first", "cheap::above", "dear::first"]
    assert mutations.nearest(runs, found[1, "4"]) == all_of_them
    unknown = found[1, "4"]._replace(file="new.py")
    assert set(mutations.nearest(runs, unknown)) == {*runs} - {""}


USE = """
import gradxform as gx
import jax.numpy as jnp
from gradxform import contrib

def test_a_step():
    tx = contrib.cautious(gx.adagrad(0.1))
    leaf = jnp.ones(3)
    tx.update(leaf, tx.init(leaf), leaf)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python cannot say which run")
def test_lines_of_each_test_are_recorded(tmp_path):
    again = USE.partition("def ")[2].replace("a_step", "a_second_step")
    (tmp_path / "test_one.py").write_text(f"{USE}\ndef {again}")
    (tmp_path / "test_other.py").write_text(USE)
    options = ["-p", "tests.lines", f"--lines={tmp_path}", f"--rootdir={tmp_path}"]
    assert mutations.failures(mutations.REPOSITORY, *options, str(tmp_path)) == []
    runs = lines.read(tmp_path)
    one, second = "test_one.py::test_a_step", "test_one.py::test_a_second_step"
    other = "test_other.py::test_a_step"
    assert set(runs) == {"", one, second, other}
    assert runs[one].seconds > 0
    # The other file traces anew, also a function that JAX has in its cache.
    module = "contrib/_cautious.py"
    assert runs[one].lines[module] == runs[other].lines[module]
    # A second test calls the function again.
    assert runs[second].lines[module]
    assert runs[second].lines[module] <= runs[one].lines[module]
    # Definitions ran with the import.
    assert not runs[one].lines[module] & runs[""].lines[module]
