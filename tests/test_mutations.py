"""The faults that ``python -m tests.mutations`` builds in."""

import textwrap

import pytest

from tests.mutations import PACKAGE, mutations, of_files

SOURCE = '''
    """A docstring with é."""
    def f(x: int | None, *, flag=False) -> "a + b":
        x = g(x)  # é
        h(x.sum())
        if not x < 2:
            raise ValueError(f"{x + 1}")
        return x[-1] * y if flag and x else y
'''
FAULTS = """
3: False -> True
4: g(x) -> (x)
4: x = g(x) -> pass
5: h(x.sum()) -> (x.sum())
5: h(x.sum()) -> pass
5: x.sum() -> (x)
6: 2 -> 3
6: not x < 2 -> (x < 2)
6: not x < 2 -> False
6: not x < 2 -> True
6: x < 2 -> x <= 2
8: -1 -> (1)
8: 1 -> 2
8: flag and x -> (flag or x)
8: flag and x -> False
8: flag and x -> True
8: x[-1] * y -> (x[-1] / y)
"""


def test_the_faults_of_a_source_are_these():
    found = mutations("", textwrap.dedent(SOURCE))
    got = sorted(f"{m.line}: {m.before} -> {m.after}" for m in found)
    assert got == FAULTS.strip().splitlines()
    for mutation in found:
        lines = mutation.source.splitlines()
        assert mutation.after in lines[mutation.line - 1]
        assert len(lines) == len(SOURCE.strip("\n").splitlines()) + 1


@pytest.mark.parametrize("file", ["_late/gate.py", "_trees/norms.py"])
def test_a_sample_is_the_same_each_time(file):
    (one, two), every = of_files([file], 2), of_files([file], None)
    assert [one, two] == of_files([file], 2)
    assert one != two
    assert {one, two} <= {*every}
    for mutation in every:
        compile(mutation.source, str(PACKAGE / file), "exec")
