"""The user's program runs, but for its mistakes, and type checkers find these."""

import importlib.util

import pytest

from tests.test_pages import blocks
from tests.typing.__main__ import PROGRAM, mistakes, mypy, pyright


@pytest.mark.slow
def test_the_program_runs_without_its_mistakes(capsys):
    wrong = mistakes(PROGRAM)
    lines = enumerate(PROGRAM.read_text().splitlines(), 1)
    left = {}
    exec("\n".join(line for n, line in lines if n not in wrong), left)
    left["main"]()
    *_, ids, rows = capsys.readouterr().out.splitlines()
    assert (ids, rows) == ("[0]", "[0. 0. 0.] (5, 3)")


@pytest.mark.slow
@pytest.mark.parametrize("tool", [mypy, pyright], ids=lambda tool: tool.__name__)
def test_another_mistake_is_found(tool, tmp_path):
    if importlib.util.find_spec(tool.__name__) is None:
        pytest.skip("it is part of the extra dev")
    text = PROGRAM.read_text()
    path = tmp_path / "program.py"
    path.write_text(text + "    params = x\n")
    found, _ = tool(path)
    assert found == {*mistakes(PROGRAM), len(text.splitlines()) + 1}


@pytest.mark.slow
def test_the_readme_has_no_mistake(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("it is part of the extra dev")
    (code,), _ = blocks("README.md")
    path = tmp_path / "readme.py"
    path.write_text(code)
    found, report = pyright(path)
    assert not found, report
