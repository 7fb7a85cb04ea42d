"""The user's program runs, and type checkers find the mistakes at its end."""

import ast
import importlib.util
import re

import pytest

from tests.test_pages import blocks
from tests.typing import every_name
from tests.typing.__main__ import PROGRAM, pyright


@pytest.mark.slow
def test_the_program_with_every_name_runs():
    every_name.main()


def test_the_program_with_every_name_has_every_name():
    """Also the method that is new, and none of another name."""
    text = (PROGRAM.parents[1] / "public_api.txt").read_text()
    public = {*re.findall(r"(?m)^(?:\w+ )?gradxform\.([\w.]+?)(?:\(|$)", text)}
    public = {name for name in public if not name.endswith(".update")}
    names = {name for name in public if name.rpartition(".")[0] not in public}
    assert len(names) > 80
    used = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Attribute):
            used.add(re.sub(r"^(gx|gradxform)\.", "", ast.unparse(node)))
    assert not names - used


def test_the_program_with_every_name_has_no_way_around_types():
    text = PROGRAM.read_text()
    code = re.sub(r'(?s)""".*?"""', "", text)
    assert not re.search(r"\b(Any|cast|reveal_type|pyright)\b", code)
    assert code.count("type: ignore") == 1  # Of optax, which has no marker py.typed.


@pytest.mark.slow
def test_the_readme_has_no_mistake(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("it is part of the extra dev")
    (code,), _ = blocks("README.md")
    path = tmp_path / "readme.py"
    path.write_text(code)
    found, report = pyright(path)
    assert not found, report
