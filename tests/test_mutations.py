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


def test_files_that_run_the_line_come_first():
    module = "clip.py"
    runs = {
        "": lines.Run(9.0, {module: {1, 2}}),
        "dear": lines.Run(2.0, {module: {3, 4, 5}}),
        "cheap": lines.Run(1.0, {module: {3, 4, 5}}),
        "above": lines.Run(0.5, {module: {3}}),
        "elsewhere": lines.Run(0.1, {"other.py": {5}}),
    }
    found = faults()
    assert mutations.nearest(runs, found[3, "True"]) == ["above", "cheap", "dear"]
    assert mutations.nearest(runs, found[6, "(-most)"]) == ["cheap", "dear"]
    # Each file imports a constant.
    assert mutations.nearest(runs, found[1, "4"]) == ["above", "cheap", "dear"]
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
def test_lines_of_each_file_are_recorded(tmp_path):
    files = "test_one.py", "test_other.py"
    for file in files:
        (tmp_path / file).write_text(USE)
    options = ["-p", "tests.lines", f"--lines={tmp_path}", f"--rootdir={tmp_path}"]
    assert mutations.failures(mutations.REPOSITORY, *options, str(tmp_path)) == []
    runs = lines.read(tmp_path)
    assert set(runs) == {"", *files}
    assert runs["test_one.py"].seconds > 0
    # The other traces anew, also a function that JAX has in its cache.
    module = "contrib/_cautious.py"
    assert runs["test_one.py"].lines[module] == runs["test_other.py"].lines[module]
    # Definitions ran with the import.
    assert not runs["test_one.py"].lines[module] & runs[""].lines[module]
