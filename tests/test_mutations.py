"""The faults that ``python -m tests.mutations`` builds in still fit."""

import ast

import pytest

import gradxform as gx
from tests.descriptors import TRANSFORMATIONS
from tests.mutations import MUTATIONS, REPOSITORY, file_of

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


def test_there_are_many_of_one_name_each():
    assert len({(m.file, m.before, m.after) for m in MUTATIONS}) > 100
    assert len(MUTATIONS) == len({m.title for m in MUTATIONS})


MODULES = {str(path.relative_to(PACKAGE)) for path in PACKAGE.glob("_*/[!_]*.py")}
# test_checklist.py asks for a fault in each transformation.
MODULES -= {file_of(getattr(gx, name)) for name in TRANSFORMATIONS}


@pytest.mark.parametrize("file", sorted(MODULES - {"_trees/types.py"}))
def test_each_module_has_a_fault(file):
    assert any(m.file == file for m in MUTATIONS), (
        f"tests/mutations.py: a fault in {file}; "
        f"python -m tests.mutations --only {file}"
    )


@pytest.mark.parametrize("folder", ["", "engines"])
def test_some_other_files_have_one(folder):
    assert any(m.file.rpartition("/")[0] == folder for m in MUTATIONS)
