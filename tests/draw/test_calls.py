"""Calls that are drawn are ordinary steps; one with a slip in a keyword is refused."""

import collections
import itertools

import pytest

from gradxform._checks import keywords
from tests.draw import calls, programs

TABLES = {
    "verb": calls.VERBS,
    "loss": calls.LOSSES,
    "box": calls.BOXES,
    "keyword": calls.KEYWORDS,
    "gate": calls.GATES,
    "slip": ("keywords", "words"),
}


def drawn(count, seed):
    stream = programs.random_programs(calls.FAMILIES["calls"], seed)
    return itertools.islice(stream, count)


@pytest.mark.parametrize("seed", [1])
def test_calls_are_ordinary_steps(seed):
    for p in drawn(5, seed):
        p.check()


@pytest.mark.slow
def test_each_choice_is_drawn_and_runs():
    ran = collections.defaultdict(set)
    for p in drawn(36, seed=2):
        p.check()
        for kind, name in p.chosen:
            ran[kind].add(name)
    assert {kind: set(names) for kind, names in TABLES.items()} == ran


@pytest.mark.slow
def test_a_wrong_call_is_a_program_that_one_can_run(monkeypatch):
    """With one flag of each call lost."""
    joined = keywords.joined

    def without(*args):
        return {k: x for k, x in joined(*args).items() if k != "train"}

    monkeypatch.setattr(keywords, "joined", without)
    right = (p for p in drawn(99, 0) if "slip" not in dict(p.chosen))
    flags = (p for p in right if ("verb", "minimize") in p.chosen)
    p = next(p for p in flags if "train=True" in p.text)
    names = {}
    with pytest.raises(AssertionError, match="Mismatched"):
        exec(repr(p), names)
    monkeypatch.undo()
    names["calling"].check()
