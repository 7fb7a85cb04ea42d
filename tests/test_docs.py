"""Docstrings hold what a user looks for."""

import doctest
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import gradxform as gx
from tests import listing
from tests.descriptors import DESCRIPTORS, factory

API = pathlib.Path(__file__).with_name("public_api.txt")


def public(module):
    """The names that a module gives its users."""
    return sorted(
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    )


PUBLIC = sorted(public(gx) + public(gx.contrib))
STATES = [name for name in PUBLIC if name.endswith("State")]
RECORDS = [name for name in PUBLIC if hasattr(factory(name), "_fields")]
# What a user calls. Only its wrappers make a gated transformation.
CALLED = sorted({*PUBLIC} - {*RECORDS} - {"ServerClosedError"})
ROWS = {row.name.removeprefix("contrib."): row for row in listing.rows()}


@pytest.mark.parametrize("name", CALLED)
def test_docstring_has_all_sections(name):
    called = factory(name)
    doc = inspect.getdoc(called)
    if inspect.signature(called).parameters:
        assert "\nArgs:\n" in doc
    if inspect.isfunction(called):
        assert "\nReturns:\n" in doc
    assert re.search(r"^References:\n  \S", doc, re.M)
    assert re.search(r"^>>> (import|from) .*gradxform", doc, re.M)
    examples = doctest.DocTestParser().get_examples(doc)
    assert any(e.want or e.source.startswith("assert ") for e in examples)


@pytest.mark.every
@pytest.mark.parametrize("name", [*CALLED, *RECORDS])
def test_docstring_explains_every_argument_and_field(name):
    doc, value = inspect.getdoc(factory(name)), factory(name)
    for field in getattr(value, "_fields", ()):
        assert re.search(rf"^  {field}: ", doc, re.M), field
    for parameter in inspect.signature(value).parameters if name in CALLED else ():
        if parameter.startswith("_ray"):  # Ray adds it to an actor's class.
            continue
        assert re.search(rf"^  \*{{0,2}}{parameter}\b.*:", doc, re.M), parameter


def test_every_public_name_but_states_is_listed():
    known = [name for name in public(gx) if name not in STATES]
    for package in ("contrib", "engines"):
        names = public(getattr(gx, package))
        known += [f"{package}.{name}" for name in names if name not in STATES]
    # Keras is not imported here; tests/public_api.txt has its names.
    known += re.findall(r"^class gradxform\.(keras\.\w+)\(", API.read_text(), re.M)
    assert [row.name for row in listing.rows()] == known


@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_listed_state_and_extra_arguments_are_the_real_ones(row):
    tx, params = row.make(), jnp.ones((2, 2))
    # A wrapper that lists no state has that of its inner transformation.
    listed = ROWS[row.name]
    while not listed.state and (row_inside := row.kwargs.get("inner")):
        row, listed = row_inside, ROWS[row_inside.name]
    # The parts of the state, down to what an inner transformation keeps.
    nodes = jax.tree.leaves(
        tx.init(params), is_leaf=lambda x: type(x).__name__ in STATES
    )
    fields = {field for node in nodes for field in getattr(node, "_fields", ())}
    assert fields <= {*listed.state}
    assert bool(fields) == bool(listed.state)
    assert {*row.extra(params)} <= {*listed.extra}


def test_every_listed_extra_argument_does_something():
    params, seen = jnp.ones((2, 2)), set()
    for row in DESCRIPTORS:
        tx, known = row.make(), ROWS[row.name].extra
        extra = row.extra(params)
        for name in {*known} & {*extra} - {"value"}:
            seen.add((row.name, name))
            others = {k: v for k, v in extra.items() if k != name}
            with pytest.raises((TypeError, ValueError), match=name):
                tx.update(params, tx.init(params), params, **others)
    # The others may be left out. Without this one the norm of the updates is 2.
    tx = gx.clip_by_global_norm(1.0)
    updates, _ = tx.update(params, tx.init(params), use_norm=4.0)
    assert updates.tolist() == (params / 4).tolist()
    seen.add(("clip_by_global_norm", "use_norm"))
    tx = gx.skip_spikes(gx.scale_by_learning_rate(1.0))
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.inf)
    assert not updates.any()
    seen.add(("skip_spikes", "value"))
    for name in ("accumulate", "conditional_accumulator"):
        tx = getattr(gx, name)(gx.scale_by_learning_rate(1.0), 9)
        _, state = tx.update(params, tx.init(params), local_step=0, weight=3)
        updates, _ = tx.update(5 * params, state, local_step=0, last=True)
        assert updates.tolist() == (-2 * params).tolist()
        seen |= {(name, "weight"), (name, "last")}
    assert seen == {(name, extra) for name, row in ROWS.items() for extra in row.extra}
