"""Steps that are drawn are the ordinary steps of optax, or are refused by name.

So are updates that are drawn, by layers and by the row.
"""

import itertools

import pytest

from gradxform._layers.step_leaves import StepLeaves
from tests.draw import programs, steps, updates

FAMILIES = updates.FAMILIES | steps.FAMILIES
TABLES = {
    "stacks": (1, 2, 3),
    "layer": steps.LAYERS,
    "beside": steps.BESIDE,
    "remat": steps.REMATS,
    "rate": steps.RATES,
    "optimizer": steps.OPTIMIZERS,
    "link": steps.LINKS,
    "part": steps.PARTS,
    "gate": steps.GATES,
    "run": steps.RUNS,
    "memory": steps.MEMORIES,
    "mesh": steps.MESHES,
    "loss": (
        *("axis of layers", "groups of layers", "a second scan, without a derivative"),
        *("a checkpoint around all", "a second scan that learns"),
    ),
    "layers": ("a leaf", "some stacks"),
    "frozen": ("some parts",),
    "around": ("tables", "lazy", "an outer link", "half precision"),
}


def drawn(family, count, seed):
    return itertools.islice(programs.random_programs(FAMILIES[family], seed), count)


@pytest.mark.every
@pytest.mark.parametrize("family", ["losses", "optimizers", "places"])
def test_a_step_is_the_ordinary_one(family):
    next(programs.telling(drawn(family, 200, seed=29), set())).check()


@pytest.mark.every
@pytest.mark.parametrize("family", updates.FAMILIES)
def test_updates_are_the_ordinary_ones(family):
    for p in drawn(family, 3, seed=29):
        p.check()


@pytest.mark.slow
def test_each_choice_is_drawn_and_runs():
    """Not most steps are refused, or the comparison would say nothing.

    Of a family run as many as have a choice that has not run yet, and at least three.
    """
    ran, refused, count = set(), 0, 0
    for family in steps.FAMILIES:
        stream = programs.telling(drawn(family, 200, seed=1), ran)
        for number, p in enumerate(stream):
            if number >= 3 and p.chosen <= ran:
                break
            is_refused = p.check() is not None
            refused, count = refused + is_refused, count + 1
            ran |= set() if is_refused else p.chosen
    assert {(kind, name) for kind, names in TABLES.items() for name in names} == ran
    assert refused < 0.4 * count


@pytest.mark.slow
@pytest.mark.parametrize("family", updates.FAMILIES)
def test_updates_by_layers_and_by_the_row(family):
    found = [p.check() for p in drawn(family, 32, seed=1)]
    assert sum(x is not None for x in found) < 0.6 * len(found)


@pytest.mark.slow
def test_a_wrong_step_is_a_program_that_one_can_run(monkeypatch):
    """With the layers of each stack written twice as large."""
    written = StepLeaves.written

    def doubled(self, new, layer, wholes):
        return written(self, {n: 2 * x for n, x in new.items()}, layer, wholes)

    (p,) = drawn("losses", 1, seed=0)
    monkeypatch.setattr(StepLeaves, "written", doubled)
    names = {}
    with pytest.raises(AssertionError, match="Mismatched"):
        exec(repr(p), names)
    monkeypatch.undo()
    names["training"].check()
