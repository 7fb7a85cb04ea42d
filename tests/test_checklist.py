"""What each public name needs. For each gap the test prints one line: file and command.

    python -m pytest -m "" -k "nothing_is_missing and adagrad"

``docs/adding.md`` explains the list by an example.
"""

import dataclasses
import inspect
import pathlib
import re

import numpy as np
import pytest

import gradxform as gx
from tests import oracles
from tests.descriptors import (
    CLIPS,
    DESCRIPTORS,
    KEPT,
    NO_ORIGINAL,
    RANGES,
    TRANSFORMATIONS,
    range_text,
)

ROOT = pathlib.Path(__file__).parents[1]
PUBLIC = {
    name: getattr(module, name)
    for module in (gx, gx.contrib, gx.engines)
    for name in dir(module)
    if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
}
NUMBER = re.compile(r"ArrayLike|ScalarOrSchedule|\b(float|int)\b")


def text(pattern):
    return "\n".join(path.read_text() for path in sorted(ROOT.glob(pattern)))


API, CHANGELOG, TABLES, SURFACE = map(
    text, ("docs/api/*.md", "CHANGELOG.md", "docs/coming_from/*.md", "tests/*.txt")
)


def of_every_name(name):
    """Yields what any public name lacks, with the command that closes the gap."""
    if len(re.findall(rf"^\.\. auto\w+:: {name}\b", API, re.M)) != 1:
        entry = "autofunction" if inspect.isfunction(PUBLIC[name]) else "autoclass"
        yield (
            f"docs/api/: one entry, .. {entry}:: {name}",
            "python -m sphinx -W -n docs docs/_build/html",
        )
    # The name of a state follows from the name of its transformation.
    if not name.endswith("State") and not re.search(rf"\b{name}\b", CHANGELOG):
        yield "CHANGELOG.md: the name, under the newest heading", command(name)
    if not re.search(rf"\b{name}\b", SURFACE):
        yield (
            "tests/public_api.txt: its signature",
            "python -m tests.public_api > tests/public_api.txt",
        )


def of_a_transformation(name):
    """Yields what only a transformation can lack."""
    rows = [row for row in DESCRIPTORS if row.name == name]
    alias = name.removeprefix("scale_by_")
    if not rows:
        yield f"tests/descriptors.py: a row, D({name!r}, ...)", command(name)
    has_inner = "inner" in parameters(name)
    if oracles.of(name) is None:
        wanted = f"the formula, def {alias}(params, sequence, ...)"
        if has_inner:
            wanted = f"the new updates, def {name}(sequence, moved, ...), or ACTING"
        yield f"tests/oracles.py: {wanted}", command(name, "tests/test_contract.py")
    elif rows:
        unknown = {name, alias}.isdisjoint({*KEPT, *oracles.AT_ONCE})
        if unknown and not has_inner and keeps_arrays(rows):
            yield (
                f"tests/descriptors.py: KEPT[{alias!r}], the fields of its state",
                command(name, "tests/test_contract.py"),
            )
        if has_inner and name not in oracles.ACTING and not any(map(changes, rows)):
            yield (
                "tests/descriptors.py: a row in which it changes what inner does",
                command(name, "tests/test_contract.py"),
            )
        for argument in idle(name):
            yield (
                f"tests/descriptors.py: a row in which {argument} changes the numbers",
                command(name, "tests/test_contract.py"),
            )
    for number in rows[0].numbers() if rows else ():
        if number not in RANGES and f"{name}.{number}" not in RANGES:
            yield (
                f"tests/descriptors.py: its range, in RANGES, of {name}.{number}",
                command(name, "tests/test_contract.py"),
            )
        elif (said := as_documented(range_text(name, number))) not in entry(
            name, number
        ):
            yield f"its docstring: of {number}, that it is {said}", command(name)
    has_row = re.search(rf"^\|.*\bgx\.(contrib\.)?({name}|{alias})\(", TABLES, re.M)
    if bool(has_row) == bool({name, alias} & {*NO_ORIGINAL}):
        yield (
            f"docs/coming_from/: a row with gx.{alias}(...); if there is no original, "
            "tests/descriptors.py: the reason in NO_ORIGINAL",
            command(name, "tests/test_migration.py"),
        )


def as_documented(interval):
    """How a docstring says a range: "≥ 0", "in [1, 2³¹ - 1]", or nothing."""
    ends = (interval or "").removeprefix("integers in ")
    powers = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    ends = re.sub(r"\*\*(\d+)", lambda power: power[1].translate(powers), ends)
    inside = f"in {ends.replace(' / ', '/')}" if interval else ""
    words = {"[0, inf)": "≥ 0", "[0, inf]": "≥ 0", "(-inf, 0]": "≤ 0"}
    return (words | {"[8, 8]": "8, the only number"}).get(ends, inside)


def entry(name, argument):
    """What the docstrings of ``x`` and ``scale_by_x`` say of an argument."""
    names = [name, f"scale_by_{name}"]
    if argument in CLIPS:
        names.append("adagrad")
    docs = [inspect.getdoc(PUBLIC[n]) for n in names if n in PUBLIC]
    form = rf"^  {argument}: (.*?)(?=^  \w+: |^\S|\Z)"
    return " ".join(" ".join(re.findall(form, "\n".join(docs), re.M | re.S)).split())


def keeps_arrays(rows):
    params = {"w": np.zeros((3, 2))}
    return any(x.ndim for row in rows for x in row.state(params))


def command(name, where=""):
    """The command that runs the tests of a name."""
    return f'python -m pytest -m "" -k {name} {where}'.strip()


def parameters(name):
    return inspect.signature(PUBLIC[name]).parameters


def idle(name):
    """The arguments that matter to the formula in no row of a transformation.

    A wrong formula for them would stay unseen. An argument of ``scale_by_x`` may matter
    in the rows of its alias ``x``.
    """
    if name == "low_bit_state":  # They say how near it comes: test_half_precision.py.
        return
    names = {name, name.removeprefix("scale_by_")}
    rows = [row for row in DESCRIPTORS if row.name in names]
    for p in parameters(name).values():
        is_number = NUMBER.search(p.annotation)
        if (is_number or p.annotation == "bool") and p.default is not p.empty:
            on = [row for row in rows if row.kwargs.get(p.name, p.default) != p.default]
            if not any(differs(row, p.name) for row in on) if is_number else not on:
                yield p.name


def changes(row):
    """Whether a wrapper's formula gives other numbers than that of its ``inner``."""
    return unlike(row, row.kwargs["inner"])


def differs(row, argument):
    """Whether the formula gives other numbers without an argument of the row."""
    kwargs = {k: v for k, v in row.kwargs.items() if k != argument}
    return unlike(row, dataclasses.replace(row, kwargs=kwargs))


def unlike(row, other):
    rng = np.random.default_rng(16)  # The third is the longest.
    params, *pushes = ({"w": rng.standard_normal((3, 2))} for _ in range(4))
    return not all(
        np.allclose(
            *(oracles.expected(r, params, pushes[:n])["w"] for r in (row, other)),
            rtol=1e-3,
        )
        for n in (1, 2, 3)
    )


def with_underscores(name):
    """The id of a case. ``-k delayed_nesterov`` finds its state's class, too."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name)
    return name if words == name else f"{name}-{words}"


@pytest.mark.every
@pytest.mark.parametrize("name", PUBLIC, ids=with_underscores)
def test_nothing_is_missing(name):
    gaps = [*of_every_name(name)]
    if name in TRANSFORMATIONS:
        gaps += of_a_transformation(name)
    if gaps:
        lines = (f"{name}: {gap}; {how}" for gap, how in gaps)
        pytest.fail("\n".join(lines), pytrace=False)
