"""The public surface changes only if somebody means it to, and the change says so."""

import difflib
import inspect
import pathlib

import gradxform as gx
from tests import public_api

ROOT = pathlib.Path(__file__).parents[1]
WRITTEN = ROOT / "tests/public_api.txt"
HOW = """
The public surface has changed. If it was meant to, then say so in both places, and look
at the diff of the first:

  python -m tests.public_api > tests/public_api.txt
  a line under the newest heading of CHANGELOG.md

From 1.0 on a line with a minus needs a deprecation first: docs/versions.md says how.
"""


def test_the_public_surface_equals_its_list():
    now = "\n".join(public_api.entries()).splitlines()
    then = WRITTEN.read_text().splitlines()
    changes = difflib.unified_diff(then, now, WRITTEN.name, "today", n=1, lineterm="")
    assert now == then, HOW + "\n".join(changes)


def test_an_alias_has_the_defaults_of_its_transformation():
    compared = set()
    public = {name: getattr(m, name) for m in (gx, gx.contrib) for name in dir(m)}
    for name, make in public.items():
        alias = public.get(name.removeprefix("scale_by_"))
        if inspect.isfunction(make) and alias not in (None, make):
            for parameter in inspect.signature(make).parameters.values():
                same = inspect.signature(alias).parameters[parameter.name]
                assert same.default == parameter.default, parameter
                assert same.annotation == parameter.annotation
                compared.add((name, parameter.name))
    assert len(compared) > 20
