"""Programs of a whole tree of matrices on a mesh: loops, conditionals, numbers of all.

The expected numbers are those of one device, where no array is cut.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests import in_numpy
from tests.conftest import half
from tests.training.matrix_optimizers import kron, soap
from tests.training.test_matrix_optimizers import (
    TYPES,
    Trial,
    close,
    in_branches,
)
from tests.training.test_whole_matrices import draw, mesh, placed_state, places

pytestmark = pytest.mark.usefixtures("standard_promotion")

LEAVES = dict.fromkeys("abcdefgh", (16, 16)), dict.fromkeys("abcdefgh", P("x"))
STACKS = (
    {"a": (8, 16, 16), "b": (8, 16, 16), "c": (16, 8)},
    {"a": P(None, "x"), "b": P(None, "x"), "c": P("x")},
)


def each(f, *trees):
    def one(*arrays):
        return jax.vmap(f)(*arrays) if arrays[0].ndim > 2 else f(*arrays)

    return jax.tree.map(one, *trees)


def normed(x):
    return x / (1 + jnp.linalg.norm(x))


def scaled(t, by):
    return jax.tree.map(lambda x: x * by, t)


def step(x):
    return 1.5 * x - 0.5 * x @ x.T @ x


def run(f, shapes, specs, axis_type=AxisType.Auto, sizes=(8,)):
    """The program of an update without state; its numbers are those of one device."""
    on = mesh(sizes, axis_type)
    where = places(specs, on)
    said = where if axis_type == AxisType.Auto else None
    tx = gx.whole_matrices(optax.stateless(lambda u, _: f(u)), said)
    plain = jax.device_get(draw(shapes))
    with jax.set_mesh(on):
        grads = jax.device_put(plain, where)
        update = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])
        program = update.lower(grads).compile()
        actual = jax.device_get(program(grads))
    close(actual, jax.device_get(in_numpy.jit(f)(plain)), 1e-5)
    return program


def by_scan(t):
    """It also makes arrays of each turn, and reads some."""
    over = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), t)
    last, all_ = lax.scan(
        lambda t, s: (each(lambda x, y: step(x) + y, t, s), each(step, t)),
        *(t, over),
        reverse=True,
    )
    return jax.tree.map(lambda x, y: x + y[1], last, all_)


def with_counter(goes_on, t):
    def body(c):
        return c[0] + 1, each(step, c[1])

    return lax.while_loop(goes_on, body, (0, t))[1]


LOOPS = {
    "fori_loop": lambda t: lax.fori_loop(0, 3, lambda _, t: each(step, t), t),
    "while_loop": lambda t: with_counter(lambda c: c[0] < 3, t),
    "scan": by_scan,
    "loop in a loop": lambda t: lax.fori_loop(
        0, 2, lambda _, t: lax.fori_loop(0, 2, lambda _, t: each(step, t), t), t
    ),
    "conditional in a loop": lambda t: lax.fori_loop(
        0, 2, lambda i, t: lax.cond(i == 0, lambda t: each(step, t), lambda t: t, t), t
    ),
    "loop in a conditional": lambda t: lax.cond(
        t["a"].size > 1,
        lambda t: lax.fori_loop(0, 2, lambda _, t: each(step, t), t),
        lambda t: t,
        t,
    ),
    "checkpoint": jax.checkpoint(lambda t: each(step, t)),
    "forms for platforms": lambda t: lax.platform_dependent(
        t, default=lambda t: each(step, t), cpu=lambda t: each(step, t)
    ),
    "norms of a form for one platform": lambda t: each(
        step, scaled(t, 1 / gx.global_norm(t))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("model", [LEAVES, STACKS], ids=["leaves", "stacks"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_program_of_all_leaves_is_divided(name, model, axis_type):
    program = run(lambda u: LOOPS[name](each(normed, u)), *model, axis_type)
    always, seldom = in_branches(program)
    groups = 1 if model is LEAVES else 2
    kinds = [kind for kind, _ in always]
    assert "all-gather" not in kinds
    assert kinds.count("all-to-all") + len(seldom) <= 2 * groups


def total(t):
    return optax.tree.norm(t)


def by_custom_jvp(t):
    f = jax.custom_jvp(lambda t: each(step, t))
    f.defjvp(lambda p, t: (f(*p), t[0]))
    return f(t)


MIXED = {
    "while": lambda t: with_counter(lambda c: (c[0] < 3) & (total(c[1]) < 9), t),
    "scan": lambda t: lax.fori_loop(
        0, 3, lambda _, t: scaled(each(step, t), 1 / total(t)), t
    ),
    "custom_jvp_call": by_custom_jvp,
}


@pytest.mark.every
@pytest.mark.parametrize("name", MIXED)
def test_a_loop_that_mixes_parameters_is_refused_by_name(name):
    with pytest.raises(TypeError, match=f"{name}.*matrices of several parameters"):
        run(lambda u: MIXED[name](each(normed, u)), *LEAVES)


# A loop of three turns, and a conditional.
WITH_EFFECTS = {
    "scan": (lambda f, t: lax.fori_loop(0, 3, lambda _, t: f(t), t), 3),
    "cond": (lambda f, t: lax.cond(total(t) < 99, f, lambda t: t, t), 1),
}


@pytest.mark.every
@pytest.mark.parametrize("name", WITH_EFFECTS)
def test_what_has_effects_is_not_divided(name):
    """Each part would have them again; with products of matrices it is refused."""
    of_all, times = WITH_EFFECTS[name]

    def heard(repeated):
        def turn(t):
            jax.debug.callback(calls.append, times)
            return repeated(t)

        calls = []
        run(lambda u: of_all(turn, each(step, each(normed, u))), *LEAVES)
        jax.effects_barrier()
        return len(calls)

    # On the mesh, and on one device.
    assert heard(lambda t: scaled(t, 2.0)) == 2 * times
    with pytest.raises(TypeError, match=f"'{name}'.* has effects"):
        heard(lambda t: each(step, t))


def two_rounds(t):
    made = each(step, each(normed, t))
    return each(step, scaled(made, 1 / total(made)))


NUMBERS = {
    "always": two_rounds,
    "in a branch": lambda t: lax.cond(total(t) < 99, two_rounds, lambda t: t, t),
    "before a branch": lambda t: lax.cond(
        total(each(step, each(normed, t))) < 99,
        lambda t: each(step, t),
        lambda t: t,
        each(normed, t),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("model", [LEAVES, STACKS], ids=["leaves", "stacks"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_all_parameters_between_two_rounds(name, model, axis_type):
    program = run(NUMBERS[name], *model, axis_type)
    always, seldom = in_branches(program)
    kinds = [kind for kind, _ in (*always, *seldom)]
    assert "all-gather" not in kinds
    assert kinds.count("all-to-all") <= 4 * (1 if model is LEAVES else 2)


class State(NamedTuple):
    count: Any
    key: Any


def probed(by_matrix):
    """Products with random probes, of one key for a whole stack, or one for each."""

    def init(params):
        del params
        return State(jnp.zeros((), jnp.int32), jax.random.key(3))

    def update(updates, state, params=None):
        del params
        key, *keys = jax.random.split(state.key, 1 + len(updates))

        def one(g, key):
            if by_matrix and g.ndim > 2:
                return jax.vmap(one)(g, jax.random.split(key, len(g)))
            probe = jax.random.normal(key, g.shape)
            size = jnp.linalg.norm(g, axis=(-2, -1), keepdims=True)
            return (g @ jnp.swapaxes(probe, -1, -2) @ g + g) / size

        pairs = zip(updates.items(), keys, strict=True)
        made = {name: one(g, k) for (name, g), k in pairs}
        return made, State(state.count + 1, key)

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("by_matrix", [False, True], ids=["one key", "keys"])
@pytest.mark.parametrize("sizes", [(8,), (4, 2)], ids=["8", "4 x 2"])
def test_random_numbers_are_those_of_one_device(sizes, by_matrix, axis_type):
    on = mesh(sizes, axis_type)
    where = places(STACKS[1], on)
    plain, tx = jax.device_get(draw(STACKS[0])), probed(by_matrix)
    ours = gx.whole_matrices(tx, where if axis_type == AxisType.Auto else None)
    with jax.set_mesh(on):
        grads = jax.device_put(plain, where)
        state = placed_state(tx, grads, tx.init(plain))
        program = jax.jit(ours.update).lower(grads, state, grads).compile()
        expected = tx.init(plain)
        for _ in range(2):
            actual, state = program(grads, state, grads)
            wanted, expected = in_numpy.jit(tx.update)(plain, expected)
            close(jax.device_get((actual, state)), (wanted, expected), 1e-5)
    always, _ = in_branches(program)
    assert "all-gather" not in [kind for kind, _ in always]


def first_apart(tx):
    """A conditional around all of a step, and one for the eigenbases inside of it."""

    def update(updates, state, params=None):
        def first(updates, state):
            return optax.tree.zeros_like(updates), tx.update(updates, state, params)[1]

        def later(updates, state):
            return tx.update(updates, state, params)

        return lax.cond(state.count == 0, first, later, updates, state)

    return optax.GradientTransformation(tx.init, update)


# How many arrays of a leaf travel at each push at most; all others travel in branches.
GATES = {
    "accumulate": (lambda tx: gx.accumulate(tx, 2), 2),
    "skip_spikes": (gx.skip_spikes, 1),
    "first apart": (first_apart, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "axis_type"), half(GATES, [soap, kron], TYPES)
)
def test_behind_a_gate_arrays_travel_if_it_lets_them(name, make, axis_type):
    wrap, arrays = GATES[name]
    trial = Trial(lambda: wrap(make()), "8 leaves", axis_type)
    actual, program = trial.run()
    close(actual, trial.expected(), 3e-4)
    always, seldom = in_branches(program)
    assert {kind for kind, _ in always} <= {"all-to-all", "all-reduce"}
    assert {kind for kind, _ in seldom} == {"all-to-all"}
    assert len(always) <= 4
    assert sum(size for _, size in always) <= (arrays / 8 + 0.01) * trial.size


def test_few_entries_on_explicit_axes():
    """No core needs them, but explicit axes multiply no parts."""
    run(lambda t: each(step, t), {"a": (8, 4)}, {"a": P("x")}, AxisType.Explicit)
