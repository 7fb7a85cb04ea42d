"""Optimizers that keep matrices in their state, with whole matrices on a mesh.

The expected numbers are those of one device, where no array is cut.
"""

import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests import in_numpy
from tests.training.matrix_optimizers import ALL, at_once, dion, soap
from tests.training.test_whole_matrices import (
    COLLECTIVE,
    collectives,
    draw,
    mesh,
    placed_state,
    places,
    step_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

M, N = 16, 24
BIAS = {"b": (6,)}, {"b": P()}
EIGHT = dict.fromkeys("cdefghij", (M, M))
OF_LEAF = dict.fromkeys("acd", (M, N))
ON_BOTH = dict.fromkeys("acd", P("x", "y"))
# Shapes, how they are cut, the mesh, whether the state lies by matrix.
LAYOUTS = {
    "8": ({"w": (8, M, N)}, {"w": P(None, "x")}, (8,), True),
    "4 x 2": ({"w": (16, M, N)}, {"w": P(None, "x", "y")}, (4, 2), True),
    "2 x 2 x 2": ({"w": (8, M, N)}, {"w": P("z", "y", "x")}, (2, 2, 2), True),
    "experts": ({"w": (2, 8, M, N)}, {"w": P(None, "y", "x")}, (4, 2), True),
    "three stacks": (
        {"w": (8, M, N), "v": (8, M, N), "u": (16, M, N)},
        dict.fromkeys("wvu", P(None, "x", "y")),
        (4, 2),
        True,
    ),
    "square": ({"w": (8, M, M)}, {"w": P(None, "x", "y")}, (4, 2), True),
    "a leaf each": (OF_LEAF, ON_BOTH, (4, 2), False),
    "prime": ({"w": (5, M, N)}, {"w": P(None, None, "x")}, (8,), False),
}
FOR_FIGURES = {"8 leaves": (EIGHT, dict.fromkeys(EIGHT, P("x", "y")), (4, 2), False)}
TYPES = [AxisType.Auto, AxisType.Explicit]
DEAR = "soap", "kron"  # Their programs take seconds to compile.
# Eigenvectors amplify what is rounded.
TOLERANCE = {"soap": 3e-4, "shampoo": 1e-4, "one-sided": 1e-4}


def close(actual, expected, tolerance):
    def check(path, x, y):
        assert x.dtype == y.dtype, path
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x, y = map(jax.random.key_data, (x, y))
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        largest = max(np.max(np.abs(y), initial=0), 1e-3)
        np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree.map_with_path(check, actual, expected)


def in_branches(program):
    """The collectives that always run, and those in branches, each with its size."""
    text, found = program.as_text(), ([], [])
    programs = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    )
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", text, re.M)
    waiting, seen = [(entry, 0)], set()
    while waiting:
        name, where = this = waiting.pop()
        if this in seen:
            continue
        seen.add(this)
        for line in programs[name].splitlines():
            for types, kind in COLLECTIVE.findall(line):
                dims = re.findall(r"\[([\d,]*)\]", types)
                size = sum(math.prod(int(n) for n in d.split(",") if n) for d in dims)
                found[where].append((kind, size))
            inside = where or " conditional(" in line
            called = re.findall(r"%?([\w.-]+)", line.partition("=")[2])
            waiting += [(x, inside) for x in called if x in programs]
    return found


class Trial:
    """A step on a mesh, and its expected results."""

    def __init__(self, make, layout, axis_type, dtype=jnp.float32, wrap=lambda tx: tx):
        shapes, specs, sizes, _ = (LAYOUTS | FOR_FIGURES)[layout]
        self.mesh = mesh(sizes, axis_type)
        self.where = places(specs | BIAS[1], self.mesh)
        said = self.where if axis_type == AxisType.Auto else None
        self.inner = wrap(make())
        self.tx = wrap(gx.whole_matrices(make(), said))
        self.plain = jax.device_get(draw(shapes | BIAS[0], dtype=dtype))
        self.pushes = [draw(shapes | BIAS[0], seed, dtype) for seed in range(1, 7)]
        self.params = jax.device_put(self.plain, self.where)
        self.size = sum(x.size for x in jax.tree.leaves(self.plain))

    def expected(self):
        now, step = (
            (self.plain, jax.jit(self.inner.init)(self.plain)),
            jax.jit(step_of(self.inner)),
        )
        for grads in self.pushes:
            now = step(*now, grads)
        return jax.device_get(now)

    def state(self):
        like = gx.abstract_state(self.tx, self.params)
        self.there = jax.tree.map(lambda x: x.sharding, like)
        if self.mesh.explicit_axes:
            return jax.device_put(jax.jit(self.inner.init)(self.plain), self.there)
        return jax.jit(self.tx.init, out_shardings=self.there)(self.params)

    def run(self):
        """The last parameters and state, and the program of a step."""
        with jax.set_mesh(self.mesh):
            now = self.params, self.state()
            pushes = [jax.device_put(grads, self.where) for grads in self.pushes]
            step = jax.jit(
                step_of(self.tx),
                donate_argnums=(0, 1),
                out_shardings=(self.where, self.there),
            )
            program = step.lower(*now, pushes[0]).compile()
            for grads in pushes:
                now = program(*now, grads)
        return jax.device_get(now), program


# Each optimizer has every fourth layout, half of them on explicit axes.
CASES = [
    (name, layout, TYPES[(i + j) // 4 % 2])
    for (i, name), (j, layout) in itertools.product(enumerate(ALL), enumerate(LAYOUTS))
    if (i + j) % 4 == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "axis_type"), CASES)
def test_numbers_are_those_of_one_device(name, layout, axis_type):
    trial = Trial(ALL[name], layout, axis_type)
    actual, program = trial.run()
    close(actual, trial.expected(), TOLERANCE.get(name, 1e-5))
    _, moved = collectives(program)
    always, seldom = in_branches(program)
    is_there = LAYOUTS[layout][3]
    of_two_cores = "shampoo" in name or name == "one-sided"
    assert {kind for kind, _ in always} == {"all-to-all"}
    assert len(always) == (4 if of_two_cores and not is_there else 2)
    if is_there:
        assert not seldom
        assert moved <= (2 / 8 + 0.01) * trial.size
        temporaries = program.memory_analysis().temp_size_in_bytes
        assert temporaries <= 2.5 * trial.size * 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["4 x 2", "a leaf each"])
@pytest.mark.parametrize("name", [*DEAR, "normuon"])
def test_bfloat16(name, layout):
    trial = Trial(ALL[name], layout, AxisType.Auto, jnp.bfloat16)
    actual, _ = trial.run()
    close(actual, trial.expected(), 1e-2)


def test_the_state_lies_where_matrices_are():
    """Each device has the factors of some layers, and keeps them."""
    trial = Trial(soap, "4 x 2", AxisType.Auto)
    with jax.set_mesh(trial.mesh):
        state = trial.state()
    momentum, _, (left, _), _ = state.leaves["w"]
    by_matrix = P(("x", "y"), None, None)
    assert left.sharding.spec == momentum.sharding.spec == by_matrix
    assert left.addressable_shards[0].data.shape == (2, M, M)
    assert state.count.sharding.spec == P()
    made = jax.jit(trial.tx.init)(trial.params)
    assert made.leaves["w"][2][0].sharding.is_equivalent_to(left.sharding, 3)
    like = gx.abstract_state(trial.inner, trial.params)
    assert like.leaves["w"][2][0].sharding.spec[:2] == (None, "x")


@pytest.mark.slow
def test_the_state_lies_there_without_jit():
    trial = Trial(soap, "4 x 2", AxisType.Auto)
    eager, made = trial.tx.init(trial.params), jax.jit(trial.tx.init)(trial.params)
    for x, y in zip(*map(jax.tree.leaves, (eager, made)), strict=True):
        # Without `jit` a count is on one device.
        assert not x.ndim or x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_muon_keeps_its_momentum_as_its_parameters():
    where = places({"w": P(None, "x")}, mesh((8,)))
    params = jax.device_put(draw({"w": (8, M, N)}), where)
    tx = optax.contrib.muon(
        0.1, muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
    )
    both = (gx.abstract_state(t, params) for t in (tx, gx.whole_matrices(tx, where)))
    chex.assert_trees_all_equal(*both)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("name", DEAR)
def test_a_state_that_lies_as_its_parameters(name, axis_type):
    """It costs traffic, and changes no number."""
    trial = Trial(ALL[name], "4 x 2", axis_type)
    trial.state = lambda: placed_state(
        trial.inner, trial.params, trial.inner.init(trial.plain)
    )
    trial.there = jax.tree.map(
        lambda x: x.sharding, gx.abstract_state(trial.inner, trial.params)
    )
    actual, _ = trial.run()
    close(actual, trial.expected(), TOLERANCE.get(name, 1e-5))


def test_equal_leaves_are_one_program(monkeypatch):
    """Of 48 leaves as many programs are traced and divided as of 2."""
    where = NamedSharding(mesh((8,)), P("x"))
    make_jaxpr, counts = jax.make_jaxpr, []

    def counting(*args, **kwargs):
        counts[-1] += 1
        return make_jaxpr(*args, **kwargs)

    monkeypatch.setattr(jax, "make_jaxpr", counting)
    for number in (2, 48):
        inner, calls = dion(), []

        def update(*args, inner=inner, calls=calls):
            calls.append(args)
            return inner.update(*args)

        tx = gx.whole_matrices(optax.GradientTransformation(inner.init, update), where)
        like = dict.fromkeys(range(number), jax.ShapeDtypeStruct((M, N), jnp.float32))
        counts.append(0)
        jax.eval_shape(tx.update, like, jax.eval_shape(inner.init, like), like)
        assert len(calls) == 1
    assert counts[0] == counts[1] > 2


@pytest.mark.slow
def test_one_conditional_for_all_leaves():
    """Its branch has a number of all factors, which is computed before."""
    where = places(ON_BOTH, mesh((4, 2)))
    plain = jax.device_get(draw(OF_LEAF))
    tx, ours = at_once(), gx.whole_matrices(at_once(), where)
    params = jax.device_put(plain, where)
    state = placed_state(ours, params, jax.jit(tx.init)(plain))
    update = jax.jit(ours.update)
    program = update.lower(params, state, params).compile()
    decompositions = program.as_text().count("lapack_ssyevd")
    assert " conditional(" in program.as_text()
    assert 0 < decompositions <= 2
    expected, wanted_of = in_numpy.jit(tx.init)(plain), in_numpy.jit(tx.update)
    for seed in range(1, 5):
        grads = draw(OF_LEAF, seed)
        made, state = update(jax.device_put(grads, where), state, params)
        wanted, expected = wanted_of(grads, expected, plain)
        close(jax.device_get((made, state)), (wanted, expected), 1e-4)


# Arrays of a leaf that a device gets and gives back at each push, and when it is due.
# With copies: a factor lies whole along one axis of the mesh, and goes to all of it.
DUE = {
    "soap": (5 + 2 + 2 + 4, 4 + 2 + 4),
    "shampoo": (2 + 1 + 2 + 4, 4 + 2 + 4),
    "kron": (1 + 2 + 1, 2 + 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("name", DUE)
def test_what_a_branch_alone_needs_travels_if_it_runs(name, axis_type):
    """A leaf for each layer: its state travels, that of the branch seldom."""
    trial = Trial(ALL[name], "8 leaves", axis_type)
    actual, program = trial.run()
    close(actual, trial.expected(), TOLERANCE.get(name, 1e-5))
    always, seldom = in_branches(program)
    for found, arrays in zip((always, seldom), DUE[name], strict=True):
        assert {kind for kind, _ in found} == {"all-to-all"}
        assert sum(size for _, size in found) <= arrays / 8 * trial.size
    assert len(always) <= 4


AROUND = {
    "accumulate": lambda tx: gx.accumulate(tx, 2),
    "chain": lambda tx: optax.chain(gx.clip_by_global_norm(1.0), tx, optax.scale(0.5)),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition(
        {"m": tx, "a": optax.adam(0.1)}, {"w": "m", "b": "a"}
    ),
    "skip_spikes": gx.skip_spikes,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_wrappers_around_pass_on_where_the_state_lies(name):
    trial = Trial(soap, "4 x 2", AxisType.Auto, wrap=AROUND[name])
    if name in ("masked", "partition"):
        said = trial.where | {"b": optax.MaskedNode()}
        trial.tx = AROUND[name](gx.whole_matrices(soap(), said))
    actual, program = trial.run()
    close(actual, trial.expected(), 3e-4)
    assert "all-gather" not in collectives(program)[0]
    specs = {str(x.spec) for x in jax.tree.leaves(trial.there)}
    assert any("('x', 'y')" in spec for spec in specs)
