"""A fact about the project stands in one file, and the others agree with it."""

import pathlib
import re
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = PROJECT["urls"]["Repository"]


def texts():
    """Every text of the checkout that git keeps, by its path."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("a checkout is needed")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in {".png", ".ico"}:
            yield name, path.read_text(encoding="utf-8")


def test_one_file_defines_the_address_and_all_others_repeat_it():
    """On whatever forge, as pip and git take it."""
    address = re.compile(r"[\w.-]+\.(?:com|org|io|dev)[:/][\w.-]+/gradxform(?![\w-])")
    found = [(name, link) for name, text in texts() for link in address.findall(text)]
    assert ("pyproject.toml", ADDRESS.removeprefix("https://")) in found
    wrong = {(name, link) for name, link in found if link not in ADDRESS}
    assert not wrong, wrong
