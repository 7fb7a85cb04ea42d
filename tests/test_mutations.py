"""The faults that ``python -m tests.mutations`` builds in still fit."""

import ast
import collections

import pytest

from tests.mutations import MUTATIONS, REPOSITORY

PACKAGE = REPOSITORY / "gradxform"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_it_fits_in_one_place_and_is_python(mutation):
    source = (PACKAGE / mutation.file).read_text()
    mutated = mutation.built_in(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


def test_it_has_to_fit():
    with pytest.raises(ValueError, match="0 times"):
        MUTATIONS[0].built_in("")
    with pytest.raises(ValueError, match="2 times"):
        MUTATIONS[0].built_in(2 * MUTATIONS[0].before)


def test_there_are_many_and_in_every_room_that_computes():
    assert len({(m.file, m.before, m.after) for m in MUTATIONS}) > 100
    assert len(MUTATIONS) == len({m.title for m in MUTATIONS})
    wings = collections.Counter(m.file.rpartition("/")[0] for m in MUTATIONS)
    assert wings.keys() == {
        "",
        *(path.parent.name for path in PACKAGE.glob("*/__init__.py")),
    }
    rooms = {f"{p.parent.name}/{p.name}" for p in PACKAGE.glob("_*/[!_]*.py")}
    assert rooms - {"_trees/types.py"} <= {m.file for m in MUTATIONS}
