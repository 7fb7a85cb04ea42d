"""Whole matrices on a mesh: few bytes travel, and the numbers are those of one device.

The expected numbers are optax's on one device, where no array is cut.
"""

import functools
import inspect
import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

import gradxform as gx
from gradxform._matrices import cores, placements, unplaced

pytestmark = pytest.mark.usefixtures("standard_promotion")

M, N = 64, 128
ROWS, COLUMNS = P("x"), P(None, "x")
OF_STACK = MuonDimensionNumbers(1, 2)
COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


def mesh(sizes, axis_type=AxisType.Auto):
    names = tuple("xyz"[: len(sizes)])
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))


def is_shape(x):
    return isinstance(x, tuple) and not isinstance(x, P)


def draw(shapes, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)

    def one(shape):
        x = rng.standard_normal(shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            x = x + 1j * rng.standard_normal(shape)
        return jnp.asarray(x, dtype)

    return jax.tree.map(one, shapes, is_leaf=is_shape)


def places(specs, on):
    return jax.tree.map(
        lambda spec: NamedSharding(on, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def placed_state(tx, params, state):
    """A state where it belongs."""
    there = jax.tree.map(lambda x: x.sharding, gx.abstract_state(tx, params))
    return jax.device_put(state, there)


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return gx.apply_updates(params, updates), state

    return step


def compiled(tx, params, state, grads):
    """The donated step; parameters and state stay where they are."""
    here = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(step_of(tx), donate_argnums=(0, 1), out_shardings=here)
    return step.lower(params, state, grads).compile()


def collectives(program):
    """How often each is there, and the bytes of those that move more than numbers."""
    found = COLLECTIVE.findall(program.as_text())
    kinds = [kind for _, kind in found]
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n)
        for types, kind in found
        for dims in re.findall(r"\[([\d,]*)\]", types)
        if kind != "all-reduce"
    ]
    return {kind: kinds.count(kind) for kind in kinds}, sum(sizes)


def train(tx, params, state, pushes, program=None):
    step = program or jax.jit(step_of(tx))
    for grads in pushes:
        params, state = step(params, state, grads)
    return jax.device_get((params, state))


def on_mesh(tx, shapes, specs, sizes=(8,), axis_type=AxisType.Auto, dtype=jnp.float32):
    """The step of ``tx`` with whole matrices, and all that it needs."""
    on = mesh(sizes, axis_type)
    where = places(specs, on)
    is_automatic = axis_type == AxisType.Auto
    wrapped = gx.whole_matrices(tx, where if is_automatic else None)
    params = jax.device_put(draw(shapes, dtype=dtype), where)
    with jax.set_mesh(on):
        state = placed_state(tx, params, jax.jit(tx.init)(draw(shapes, dtype=dtype)))
        pushes = [
            jax.device_put(draw(shapes, seed, dtype), where) for seed in (1, 2, 3)
        ]
        return compiled(wrapped, params, state, pushes[0]), params, state, pushes


def check(
    tx,
    shapes,
    specs,
    *args,
    moved=None,
    groups=1,
    reduced=0,
    tolerance=1e-6,
    expected=None,
    **kwargs,
):
    """Three steps, the collectives, and entries that travel, in those of a model."""
    program, params, state, pushes = on_mesh(tx, shapes, specs, *args, **kwargs)
    size = sum(x.size for x in jax.tree.leaves(params))
    kinds, entries = collectives(program)
    if moved is not None:
        found = {"all-to-all": groups, "all-reduce": reduced}
        assert kinds == {kind: n for kind, n in found.items() if n}
        assert entries <= (moved + 0.001) * size
    if expected is None:
        expected = on_one_device(tx, *jax.device_get((params, pushes)))
    close(train(None, params, state, pushes, program), expected, tolerance)
    return program


def on_one_device(tx, params, pushes):
    return train(tx, params, jax.jit(tx.init)(params), pushes)


def close(actual, expected, tolerance=1e-6):
    def check(x, y):
        largest = max(1, np.max(np.abs(y), initial=0))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)

    jax.tree.map(check, actual, expected)


def stack(spec, *shape, numbers=OF_STACK):
    """A stack, and a bias that Adam trains."""
    shapes, specs = {"w": shape, "b": (6,)}, {"w": spec, "b": P()}
    return muon(0.1, muon_weight_dimension_numbers={"w": numbers, "b": None}), (
        shapes,
        specs,
    )


def leaves(spec, number):
    return muon(0.1), ([(M, N)] * number + [(6,)], [spec] * number + [P()])


HEADS, MERGED = MuonDimensionNumbers(1, 3), MuonDimensionNumbers(1, (2, 3))
EXPERTS = MuonDimensionNumbers(2, 3)
BOTH = (4, 2)
# The model, the sizes of the mesh, all-to-alls, and entries that travel: 2 / D, times
# the padding.
LAYOUTS = {
    "stack": (stack(COLUMNS, 16, M, N), (8,), 2, 2 / 8),
    "stack on both axes": (stack(P(None, "x", "y"), 16, M, N), BOTH, 2, 2 / 8),
    "layers": (stack(ROWS, 16, M, N), (8,), 0, 0),
    "5 layers": (stack(COLUMNS, 5, M, N), (8,), 2, 2 / 8 * 8 / 5),
    "layers and rows": (stack(P("y", "x"), 8, M, N), BOTH, 2, 2 / 4 / 2),
    "one tuple": (stack(P(None, ("y", "x")), 16, M, N), BOTH, 2, 2 / 8),
    "three axes": (stack(P("z", "x", "y"), 8, M, N), (2, 2, 2), 2, 2 / 8),
    "an axis of one": (stack(P(None, "x", "y"), 16, M, N), (8, 1), 2, 2 / 8),
    "17 leaves": (leaves(ROWS, 17), (8,), 2, 2 / 8 * 24 / 17),
    "17 leaves on both axes": (leaves(P("x", "y"), 17), BOTH, 2, 2 / 8 * 24 / 17),
    # In, each half of the copies has half; out, each gets all.
    "copies": (stack(P(None, "x"), 16, M, N), BOTH, 2, 1 / 8 + 2 / 8),
    "copies alone": (stack(P(), 8, M, N), (8,), 1, 1),
    "heads by rows": (stack(COLUMNS, 4, M, 4, 16, numbers=HEADS), (8,), 2, 2 / 8),
    "by heads": (stack(P(None, None, "x"), 4, M, 8, 16, numbers=HEADS), (8,), 0, 0),
    "heads by both": (
        stack(P(None, "x", "y"), 4, M, 8, 16, numbers=HEADS),
        BOTH,
        2,
        2 / 4 / 2,
    ),
    "merged heads": (
        stack(P(None, "x", "y"), 8, M, 8, 16, numbers=MERGED),
        BOTH,
        2,
        2 / 8,
    ),
    "experts": (stack(P(None, "x"), 2, 8, M, N, numbers=EXPERTS), (8,), 0, 0),
    "experts by rows": (
        stack(P(None, None, "x"), 2, 8, M, N, numbers=EXPERTS),
        (8,),
        2,
        2 / 8,
    ),
    "experts and rows": (
        stack(P(None, "y", "x"), 2, 8, M, N, numbers=EXPERTS),
        BOTH,
        2,
        2 / 4 / 2,
    ),
}
TYPES = [AxisType.Auto, AxisType.Explicit]


@functools.cache
def expected_of(layout):
    """One device knows of no mesh."""
    (tx, (shapes, _)), *_ = LAYOUTS[layout]
    params, *pushes = jax.device_get([draw(shapes, seed) for seed in range(4)])
    return on_one_device(tx, params, pushes)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_bytes_travel_and_numbers_are_those_of_one_device(layout, axis_type):
    (tx, model), sizes, groups, moved = LAYOUTS[layout]
    if layout == "three axes" and axis_type == AxisType.Explicit:
        pytest.skip("it is that of two axes")
    how = {"moved": moved, "groups": groups, "expected": expected_of(layout)}
    check(tx, *model, sizes, axis_type, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "each"), [("stack", 2), ("17 leaves", 3)])
def test_each_device_multiplies_few_matrices(layout, each):
    """It multiplies as many of them as there are, divided and rounded up."""
    (tx, (shapes, specs)), sizes, *_ = LAYOUTS[layout]
    program, params, *_ = on_mesh(tx, shapes, specs, sizes)
    one = draw({"w": (M, N), "b": (6,)})
    alone = muon(0.1)
    plain = jax.jit(step_of(alone)).lower(one, alone.init(one), one).compile()
    flops = plain.cost_analysis()["flops"]
    elementwise = 30 * sum(x.size for x in jax.tree.leaves(params)) / 8
    assert program.cost_analysis()["flops"] <= 1.05 * each * flops + elementwise


GROUPS = (
    {"up": (16, M, N), "down": (16, N, M), "o": (16, M, M), "b": (6,)},
    {"up": P(None, "x"), "down": P(None, None, "x"), "o": COLUMNS, "b": P()},
)


@pytest.mark.slow
@pytest.mark.figures
def test_groups_run_one_after_another():
    numbers = dict.fromkeys(("up", "down", "o"), OF_STACK) | {"b": None}
    tx = muon(0.1, muon_weight_dimension_numbers=numbers)
    program, *step = on_mesh(tx, *GROUPS)
    kinds, _ = collectives(program)
    assert kinds == {"all-to-all": 6}
    size = sum(x.nbytes for x in jax.tree.leaves(step[0]))
    ours, theirs = (
        x.memory_analysis().temp_size_in_bytes / size
        for x in (program, compiled(tx, *step[:2], step[2][0]))
    )
    assert ours <= 0.26 < theirs


OPTIONS = {
    "plain": {},
    "no nesterov": {"nesterov": False},
    "schatten": {"preconditioning": "schatten"},
    "aol": {"preconditioning": "aol"},
    "spectral": {"preconditioning": "spectral"},
    "a row each": {"ns_coeffs": ((4.1, -6.9, 2.9), (3.7, -5.6, 2.3), (2.8, -3.1, 1.2))},
    "bfloat16 momentum": {"mu_dtype": "bfloat16"},
    "rms": {"consistent_rms": 0.2, "weight_decay": 0.1},
}
KNOWN = inspect.signature(muon).parameters
OPTIONS = {name: x for name, x in OPTIONS.items() if x.keys() <= KNOWN.keys()}
TWO = {"w": (M, N), "v": (M, N), "b": (6,)}, {"w": ROWS, "v": ROWS, "b": P()}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_muon(options):
    tx = muon(0.1, **OPTIONS[options])
    check(tx, *TWO, moved=2 / 8 * 8 / 2, groups=2)


@pytest.mark.slow
def test_adaptive_muon_adds_up_whole_matrices():
    """The sum over each matrix is that of a whole one, in another order."""
    tx = muon(0.1, adaptive=True)
    check(tx, *TWO, moved=2 / 8 * 8 / 2, groups=2, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_dtypes(dtype):
    tx, model = stack(COLUMNS, 8, M, N)
    check(tx, *model, dtype=jnp.dtype(dtype), moved=2 / 8, groups=2)


def each_matrix(f):
    """A transformation that applies a function to each matrix, and a momentum."""
    of_leaf = optax.stateless_with_tree_map(lambda g, _: f(g) if g.ndim > 1 else g)
    return optax.chain(optax.trace(0.9), of_leaf, optax.scale(-0.1))


def by_qr(x):
    return jnp.linalg.qr(x.T)[0].T


def by_svd(x):
    u, _, v = jnp.linalg.svd(x, full_matrices=False)
    return u @ v


def by_eigh(x):
    _, v = jnp.linalg.eigh(x @ x.T)
    return v @ (v.T @ x)


def by_cholesky(x):
    lower = jnp.linalg.cholesky(x @ x.T + 1e-3 * jnp.eye(len(x)))
    return jax.scipy.linalg.solve_triangular(lower, x, lower=True)


def newton_schulz(x):
    x = x.T / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x.T


def with_other_coefficients(x):
    """As Polar Express has them, one row for each step."""
    table = jnp.array([[3.0, -3.0, 1.0], [2.0, -1.5, 0.5]])
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def sketched(x):
    """Random numbers do not depend on the mesh."""
    thin = jax.random.normal(jax.random.key(1), (x.shape[1], 8))
    q, _ = jnp.linalg.qr(x @ thin)
    return q @ (q.T @ x)


def row_normed(x):
    """As NorMuon, behind the products."""
    x = newton_schulz(x)
    return x / (jnp.linalg.norm(x, axis=1, keepdims=True) + 1e-7)


PRODUCTS = [newton_schulz, with_other_coefficients, row_normed]


@pytest.mark.slow
@pytest.mark.parametrize("f", PRODUCTS, ids=lambda f: f.__name__)
def test_products_of_ones_own(f):
    check(each_matrix(f), *TWO, moved=2 / 8 * 8 / 2, groups=2)


@pytest.mark.slow
@pytest.mark.parametrize("f", [by_qr, by_svd, by_eigh, by_cholesky, sketched])
def test_decompositions_of_ones_own(f):
    check(each_matrix(f), *TWO, moved=2 / 8 * 8 / 2, groups=2)


def of_table(wrap):
    """A product with coefficients that stand in the program of a function inside."""

    def of(coefficients):
        table = np.array(coefficients, np.float32)

        @jax.jit
        def once(i, x):
            a, b = jnp.take(table, i, axis=0)
            return a * x + b * x @ x.T @ x

        return functools.partial(wrap, once)

    return of


def by_custom_jvp(once, x):
    f = jax.custom_jvp(functools.partial(once, 0))
    f.defjvp(lambda x, t: (f(*x), t[0]))
    return f(x)


def by_custom_vjp(once, x):
    f = jax.custom_vjp(functools.partial(once, 0))
    f.defvjp(lambda x: (f(x), None), lambda _, t: (t,))
    return f(x)


WITH_CONSTANTS = {
    "fori_loop": lambda once, x: jax.lax.fori_loop(0, 2, once, x),
    "while_loop": lambda once, x: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, once(*c)), (0, x)
    )[1],
    "cond": lambda once, x: jax.lax.cond(
        x[0, 0] < 9.0, functools.partial(once, 1), lambda x: x, x
    ),
    "checkpoint": lambda once, x: jax.checkpoint(functools.partial(once, 1))(x),
    "custom_jvp": by_custom_jvp,
    "custom_vjp": by_custom_vjp,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_programs_with_other_constants_are_others(name):
    """Of two leaves, and of the next optimizer. What is equal goes together."""
    of = of_table(WITH_CONSTANTS[name])
    tables = {"u": [[1.5, -0.5]] * 2, "v": [[2, -1]] * 2, "w": [[2, -1]] * 2}
    where = places(dict.fromkeys(tables, ROWS), mesh((8,)))
    params = jax.tree.map(lambda x: 0.1 * x, draw(dict.fromkeys(tables, (16, 16))))
    for others in ({}, {"w": [[3, -2]] * 2}):
        each = {k: of(table) for k, table in (tables | others).items()}
        tx = optax.stateless(lambda g, _, each=each: {k: each[k](g[k]) for k in g})
        update = jax.jit(gx.whole_matrices(tx, where).update)
        args = jax.device_put(params, where), tx.init(params), params
        kinds, _ = collectives(update.lower(*args).compile())
        assert kinds["all-to-all"] == 4 + 2 * len(others)
        expected, _ = tx.update(params, tx.init(params))
        close(jax.device_get(update(*args)[0]), expected)


@pytest.mark.parametrize("raises", [False, True])
def test_a_rule_for_no_derivative(raises):
    """It closes over a table, by which JAX takes none; or it raises an error."""

    def back(_, t):
        return (1 / 0,) if raises else (t,)

    table = np.array([[1.5, -0.5]], np.float32)

    @jax.custom_vjp
    def f(x):
        a, b = jnp.take(table, 0, axis=0)
        return a * x + b * x @ x.T @ x

    f.defvjp(lambda x: (f(x), None), back)
    tx = optax.stateless(lambda g, _: jax.tree.map(jax.vmap(f), g))
    check(tx, {"w": (8, 16, 16)}, {"w": P(None, "x")}, moved=2 / 8, groups=2)


@pytest.mark.slow
@pytest.mark.parametrize("f", [newton_schulz, by_svd, with_other_coefficients])
def test_vmapped_matrices_of_ones_own(f):
    tx = each_matrix(jax.vmap(f))
    shapes, specs = {"w": (8, M, N), "b": (6,)}, {"w": P(None, "x"), "b": P()}
    check(tx, shapes, specs, moved=2 / 8, groups=2)


def of_parts(x):
    """A product with a vector adds up parts: nothing has to be whole."""
    return x / jnp.linalg.norm(x @ jnp.ones(x.shape[1]))


@pytest.mark.slow
def test_a_vector_needs_no_whole_matrix():
    check(each_matrix(of_parts), *TWO, moved=0, groups=0, reduced=1)


def inside(wrap):
    return lambda: wrap(muon(0.1))


STATIC = {"ns_steps", "nesterov", "adaptive", "preconditioning"}
LABELS = {"w": "muon", "v": "adam", "b": "adam"}
INSIDE = {
    "clip": inside(lambda tx: optax.chain(gx.clip_by_global_norm(1.0), tx)),
    "norms": inside(lambda tx: optax.chain(tx, gx.measure_norms())),
    "partition": inside(
        lambda tx: optax.partition({"muon": tx, "adam": optax.adam(0.1)}, LABELS)
    ),
    "masked": inside(lambda tx: optax.masked(tx, {"w": True, "v": False, "b": True})),
    "master_weights": inside(gx.master_weights),
    "low_bit_state": inside(functools.partial(gx.low_bit_state, min_size=256)),
    "schedule_free": inside(lambda tx: optax.contrib.schedule_free(tx, 0.1)),
    "schedule": lambda: muon(optax.linear_schedule(0.1, 0.01, 10)),
    "hyperparameters": lambda: optax.inject_hyperparams(
        muon, static_args=STATIC & KNOWN.keys()
    )(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("name", INSIDE)
def test_links_and_wrappers_inside(name, axis_type):
    """Each of the two leaves is in one group, or one of them has no matrices."""
    kinds, _ = collectives(check(INSIDE[name](), *TWO, (8,), axis_type))
    assert kinds["all-to-all"] == 2
    if name != "low_bit_state":  # Scales of blocks that a mesh cuts come together.
        assert "all-gather" not in kinds


AROUND = {
    "accumulate": lambda tx: gx.accumulate(tx, 2),
    "skip_spikes": gx.skip_spikes,
    "drop_stale": lambda tx: optax.chain(
        gx.drop_stale(tx, max_staleness=1),
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "master_weights": gx.master_weights,
    "low_bit_state": functools.partial(gx.low_bit_state, min_size=256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_wrappers_around(name):
    on = mesh((8,))
    where = places(TWO[1], on)
    tx, ours = map(AROUND[name], (muon(0.1), gx.whole_matrices(muon(0.1), where)))
    extra = {"local_step": 0} if name == "drop_stale" else {}

    def run(tx, params, pushes, state):
        def step(params, state, grads):
            return gx.apply_gradients(tx, grads, state, params, **extra)

        step = jax.jit(step)
        program = step.lower(params, state, pushes[0]).compile()
        return train(tx, params, state, pushes, step), program

    params, pushes = draw(TWO[0]), [draw(TWO[0], seed) for seed in (1, 2, 3)]
    expected, _ = run(tx, params, pushes, tx.init(params))
    placed = jax.device_put((params, pushes), (where, [where] * 3))
    state = placed_state(tx, placed[0], jax.jit(tx.init)(params))
    actual, program = run(ours, *placed, state)
    close(actual, expected)
    assert collectives(program)[0]["all-to-all"] == 2


GATES = {
    "accumulate": lambda tx: gx.accumulate(tx, 2),
    "skip_spikes": gx.skip_spikes,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
}


@pytest.mark.quick_case("accumulate-False-automatic")
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_gates_inside(name, is_clipped, axis_type):
    """A gate decides for all leaves; a norm of all gradients is in its branch."""
    tx = muon(0.1)
    if is_clipped:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    kinds, _ = collectives(check(GATES[name](tx), *TWO, (8,), axis_type))
    assert "all-gather" not in kinds


def gram(g, p):
    """It reads a gradient, and something else of its shape; a number is between."""
    return (g @ p.T) @ g + jnp.sum(g @ g.T) * g if g.ndim > 1 else g


def two_results(g, p):
    del p
    if g.ndim < 2:
        return g
    q, r = jnp.linalg.qr(g)
    return r + jnp.sum(q)


@pytest.mark.slow
@pytest.mark.parametrize("f", [gram, two_results])
def test_several_arrays_and_numbers(f):
    """Parameters and gradients travel, and updates."""
    check(optax.stateless_with_tree_map(f), *TWO, groups=2, moved=3 / 8 * 8 / 2)


def printing(g, p):
    del p

    def multiply(_, x):
        jax.debug.print("{}", x[0, 0])
        return x @ x.T @ x

    return jax.lax.fori_loop(0, 2, multiply, g) if g.ndim > 1 else g


def mixing(updates, _):
    """Each leaf is multiplied by the other one."""
    return updates | {"w": updates["w"] @ updates["v"].T @ updates["w"]}


def stacking(updates, _):
    """All leaves are one batch."""
    x = jnp.stack([updates["w"], updates["v"]])
    x = x @ jnp.swapaxes(x, 1, 2) @ x
    return updates | {"w": x[0], "v": x[1]}


OF_EACH = optax.stateless_with_tree_map


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (OF_EACH(printing), "'(scan|while)'.*has effects"),
        (optax.stateless(mixing), "'dot_general'.*reads matrices of several param"),
        (optax.stateless(stacking), "reads matrices of several parameters"),
    ],
    ids=["printing", "mixing", "stacking"],
)
def test_what_is_no_core_is_refused(tx, message):
    with pytest.raises(TypeError, match=message):
        on_mesh(tx, *TWO)


def test_it_stays_where_each_device_has_whole_arrays():
    """XLA multiplies them as they lie."""
    specs = {"w": P(), "v": P(), "b": ROWS}
    shapes = {"w": (M, N), "v": (M, N), "b": (8,)}
    check(optax.stateless(mixing), shapes, specs, moved=0, groups=0)


@pytest.mark.slow
def test_few_entries_stay_where_they_lie():
    """A matrix of fewer entries than 64 is not worth a collective of its own."""
    shapes, specs = {"w": (8, 7), "v": (8, 8)}, {"w": ROWS, "v": ROWS}
    program = on_mesh(each_matrix(newton_schulz), shapes, specs)[0]
    assert collectives(program)[0]["all-to-all"] == 2
    check(each_matrix(newton_schulz), shapes, specs)


def test_layers_are_refused_by_name():
    on = mesh((8,))
    params = {"w": jax.device_put(draw((8, 16, 16)), NamedSharding(on, COLUMNS))}
    tx = gx.whole_matrices(
        muon(0.1, muon_weight_dimension_numbers={"w": OF_STACK}),
        {"w": NamedSharding(on, COLUMNS)},
    )

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.sum(x)

    step = gx.minimize(loss, tx, layers=["w"], donate=False)
    with pytest.raises(TypeError, match="may mix layers, by"):
        step(params, tx.init(params), jnp.ones((2, 16)))
    plain = gx.minimize(loss, tx, donate=False)
    traced = jax.eval_shape(plain, params, tx.init(params), jnp.ones((2, 16)))
    assert traced[2].shape == ()


@pytest.mark.slow
def test_one_device_is_the_same_program():
    params = draw(TWO[0])
    tx = muon(0.1)
    state = tx.init(params)
    where = jax.tree.map(lambda x: x.sharding, params)
    wrapped = gx.whole_matrices(tx, where)
    texts = [
        str(jax.make_jaxpr(x.update)(params, state, params)) for x in (tx, wrapped)
    ]
    assert texts[0] == texts[1]
    eager = gx.whole_matrices(tx).update(params, state, params)
    chex.assert_trees_all_equal(eager, tx.update(params, state, params))
    chex.assert_trees_all_equal_structs(wrapped.init(params), state)


@pytest.mark.slow
def test_one_explicit_device():
    """Types name its axis, so the products of ``inner`` alone would be refused."""
    tx, (shapes, specs) = stack(P(None, "x", "y"), 4, M, N)
    check(tx, shapes, specs, (1, 1), AxisType.Explicit, moved=0, groups=0)


def test_without_matrices_nothing_changes():
    tx, params = optax.adam(0.1), draw({"w": (M, N)})
    wrapped, state = gx.whole_matrices(tx), tx.init(params)
    texts = [
        str(jax.make_jaxpr(x.update)(params, state, params)) for x in (tx, wrapped)
    ]
    assert texts[0] == texts[1]


def test_automatic_axes_need_shardings():
    params = jax.device_put(draw(TWO[0]), places(TWO[1], mesh((8,))))
    state = jax.eval_shape(muon(0.1).init, params)
    tx = gx.whole_matrices(muon(0.1))
    with pytest.raises(ValueError, match=r"needs shardings here.*p\.sharding, params"):
        jax.eval_shape(tx.update, params, state, params)


@pytest.mark.slow
def test_without_jit_the_arrays_say_where_they_lie():
    params = jax.device_put(draw(TWO[0]), places(TWO[1], mesh((8,))))
    tx, state = gx.whole_matrices(muon(0.1)), jax.jit(muon(0.1).init)(params)
    plain = jax.device_get((params, state, params))
    expected, _ = jax.jit(muon(0.1).update)(*plain)
    updates, _ = tx.update(params, state, params)
    close(jax.device_get(updates), expected)
    assert updates["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def wrong_shardings():
    on = functools.partial(NamedSharding, mesh((8,)))
    rows = dict.fromkeys("wv", on(ROWS))
    other = NamedSharding(mesh((4, 2)), P())
    return {
        "lacking": (rows, TypeError, r"no value for params at \['b'\]"),
        "more": (rows | {"b": on(P()), "c": on(P())}, TypeError, r"at \['c'\]"),
        "spec": (rows | {"b": P("x")}, TypeError, r"\['b'\] must be a NamedSharding"),
        "number": (rows | {"b": 3}, TypeError, r"\['b'\] must be a NamedSharding"),
        "axes": (rows | {"b": on(P(None, "x"))}, ValueError, r"\['b'\] have more axes"),
        "uneven": (rows | {"b": on(ROWS)}, ValueError, r"\['b'\] do not fit its shape"),
        "mesh": (rows | {"b": other}, ValueError, r"\['v'\] are on another mesh"),
    }


@pytest.mark.every
@pytest.mark.parametrize(
    "name", ["lacking", "more", "spec", "number", "axes", "uneven", "mesh"]
)
def test_wrong_shardings(name):
    given, error, message = wrong_shardings()[name]
    params = draw(TWO[0])
    tx = gx.whole_matrices(muon(0.1), given)
    with pytest.raises(error, match=message):
        jax.jit(tx.update)(params, tx.init(params), params)


@pytest.mark.slow
def test_a_prefix_of_shardings():
    on = mesh((8,))
    shapes = {"a": {"w": (M, N), "v": (M, N)}, "b": (6,)}
    where = {"a": NamedSharding(on, ROWS), "b": NamedSharding(on, P())}
    params = draw(shapes)
    tx = muon(0.1)
    state, ours = tx.init(params), gx.whole_matrices(tx, where)
    program = jax.jit(ours.update).lower(params, state, params).compile()
    assert collectives(program)[0]["all-to-all"] == 2
    expected, _ = tx.update(params, state, params)
    close(jax.device_get(jax.jit(ours.update)(params, state, params)[0]), expected)


@pytest.mark.slow
def test_other_places_than_said_change_no_number():
    tx, params = muon(0.1), draw(TWO[0])
    wrong = dict.fromkeys("wv", COLUMNS) | {"b": P()}
    ours = gx.whole_matrices(tx, places(wrong, mesh((8,))))
    placed = jax.device_put(params, places(TWO[1], mesh((8,))))
    expected, _ = tx.update(params, tx.init(params), params)
    updates, _ = jax.jit(ours.update)(placed, tx.init(params), placed)
    close(jax.device_get(updates), expected)


@pytest.fixture(params=TYPES, ids=["automatic", "explicit"])
def small(request):
    """A wrapped Muon, placed parameters and state, and plain parameters."""
    on = mesh((8,), request.param)
    where = places(TWO[1], on)
    is_automatic = request.param == AxisType.Auto
    tx = gx.whole_matrices(muon(0.1), where if is_automatic else None)
    plain = draw(TWO[0])
    params = jax.device_put(plain, where)
    state = placed_state(tx, params, jax.jit(tx.init)(plain))
    with jax.set_mesh(on):
        yield tx, params, state, plain


def expected_updates(plain):
    tx = muon(0.1)
    return jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(plain)


@pytest.mark.slow
def test_types_stay(small):
    tx, params, state, _ = small
    types = [str(jax.typeof(x)) for x in jax.tree.leaves((params, state))]
    new = jax.jit(tx.update)(params, state, params)
    assert [str(jax.typeof(x)) for x in jax.tree.leaves(new)] == types
    described = jax.eval_shape(tx.update, params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(described, new)


@pytest.mark.slow
def test_vmap(small):
    tx, params, state, plain = small

    def both(x):
        spec = P(None, *x.sharding.spec)
        two = np.stack([jax.device_get(x), 2 * jax.device_get(x)])
        return jax.device_put(two, NamedSharding(x.sharding.mesh, spec))

    update = jax.jit(jax.vmap(tx.update, in_axes=(0, None, None)))
    updates, _ = update(jax.tree.map(both, params), state, params)
    first = jax.tree.map(lambda x: x[0], jax.device_get(updates))
    close(first, expected_updates(plain))


@pytest.mark.slow
def test_a_scan_of_steps(small):
    tx, params, state, plain = small

    def step(carry, _):
        params, state = carry
        return step_of(tx)(params, state, params), None

    last, _ = jax.jit(lambda *x: jax.lax.scan(step, x, None, length=3))(params, state)
    inner = muon(0.1)
    expected = plain, inner.init(plain)
    for _ in range(3):
        expected = step_of(inner)(*expected, expected[0])
    close(jax.device_get(last), expected)


@pytest.mark.slow
def test_without_jit(small):
    tx, params, state, plain = small
    updates, _ = tx.update(params, state, params)
    close(jax.device_get(updates), expected_updates(plain))
    with jax.disable_jit():
        updates, _ = tx.update(params, state, params)
    close(jax.device_get(updates), expected_updates(plain))


@pytest.mark.slow
def test_derivatives(small):
    tx, params, state, plain = small

    def total(update, state):
        def f(grads):
            updates, _ = update(grads, state, grads)
            return jnp.sum(updates["w"] ** 3)

        return f

    given = jax.jit(jax.grad(total(tx.update, state)))(params)
    inner = muon(0.1)
    expected = jax.grad(total(inner.update, inner.init(plain)))(plain)
    close(jax.device_get(given["w"]), expected["w"], tolerance=1e-5)


@pytest.mark.slow
def test_no_gradient_and_no_parameters(small):
    tx, params, _, plain = small
    updates, _ = jax.jit(tx.update)({}, tx.init({}), {})
    assert updates == {}
    masked = plain | {"v": None}
    state = jax.jit(tx.init)(masked)
    updates, _ = jax.jit(tx.update)(params | {"v": None}, state, params | {"v": None})
    assert updates["v"] is None
    close(jax.device_get(updates["w"]), expected_updates(masked)["w"])


@pytest.mark.slow
def test_inside_shard_map(small):
    tx, params, state, plain = small
    on = params["w"].sharding.mesh
    if jax.__version_info__ < (0, 8) and on.axis_types == (AxisType.Explicit,):
        pytest.skip("there the indices in optax's own Muon need a type")
    every = jax.device_put((plain, tx.init(plain)), NamedSharding(on, P()))
    over = functools.partial(jax.shard_map, mesh=on, out_specs=P())
    update = jax.jit(over(tx.update, in_specs=(P(), P(), P())))
    updates, _ = update(every[0], every[1], every[0])
    close(jax.device_get(updates), expected_updates(plain))
    cut = jax.tree.map(lambda x: x.sharding.spec, (params, state, params))
    update = over(tx.update, in_specs=cut)
    with pytest.raises(ValueError, match=r"inside of jax.shard_map.*over x.*outside"):
        update(params, state, params)
    update = over(tx.update, in_specs=(P(), P(), P()), check_vma=False)
    with pytest.raises(ValueError, match=r"inside of jax.shard_map"):
        update(every[0], every[1], every[0])


@pytest.mark.slow
def test_a_checkpoint_goes_on_elsewhere(tmp_path):
    """From 8 devices to 4 x 2, and on with optax alone."""
    tx, (shapes, _) = stack(COLUMNS, 8, M, N)
    plain, grads = draw(shapes), [draw(shapes, seed) for seed in (1, 2, 3)]
    now, folder = (plain, tx.init(plain)), tmp_path / "0"
    runs = [(COLUMNS, (8,)), (P(None, "x", "y"), BOTH), (P(), (1,))]
    with ocp.StandardCheckpointer() as saver:
        for (spec, sizes), g in zip(runs, grads, strict=True):
            saver.save(folder, now)
            saver.wait_until_finished()
            where = places({"w": spec, "b": P()}, mesh(sizes))
            like = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                *(plain, where),
            )
            now = saver.restore(folder, (like, gx.abstract_state(tx, like)))
            ours = tx if sizes == (1,) else gx.whole_matrices(tx, where)
            now = jax.jit(step_of(ours))(*now, jax.device_put(g, where))
            folder = tmp_path / f"after {sizes}"
    close(jax.device_get(now), train(tx, plain, tx.init(plain), grads))


def test_a_part_of_a_sum_is_refused():
    """On explicit axes a gradient may not be summed yet."""
    if jax.__version_info__ < (0, 10):
        pytest.skip("JAX has no such gradients")
    tx, (shapes, specs) = leaves(P(), 2)
    on = mesh((8,), AxisType.Explicit)
    params = jax.device_put(draw(shapes), places(specs, on))
    ours = gx.whole_matrices(tx)

    def update(params, state):
        part = NamedSharding(on, P(unreduced={"x"}))
        grads = jax.tree.map(lambda x: jax.sharding.reshard(x, part), params)
        return ours.update(grads, state, params)

    with jax.set_mesh(on), pytest.raises(ValueError, match="not summed over x yet"):
        jax.eval_shape(update, params, jax.jit(tx.init)(params))


def constrained(spec, named):
    def place(x):
        on = jax.sharding.get_abstract_mesh()
        assert on.shape == {"x": 8}  # A user may ask for the mesh.
        there = NamedSharding(mesh((8,), on.axis_types[0]), spec) if named else spec
        if on.explicit_axes:
            return jax.sharding.reshard(x, there)
        return jax.lax.with_sharding_constraint(x, there)

    return place


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
@pytest.mark.parametrize("named", [True, False], ids=["sharding", "spec"])
@pytest.mark.parametrize("stacked", [True, False])
def test_placements_inside_of_a_core_are_left_out(stacked, named, axis_type):
    if stacked and named and axis_type == AxisType.Explicit:
        pytest.skip("JAX has no such reshard in a batch")
    place = constrained(P(None, None) if stacked else P(), named)
    f = each_matrix(
        (jax.vmap if stacked else lambda f: f)(
            lambda x: newton_schulz(place(x)) + place(newton_schulz(x))
        )
    )
    shape, spec = ((8, M, N), P(None, "x")) if stacked else ((M, N), ROWS)
    on = mesh((8,), axis_type)
    where, plain = places({"w": spec}, on), draw({"w": shape})
    expected = newton_schulz
    expected = (jax.vmap(expected) if stacked else expected)(plain["w"])
    ours = gx.whole_matrices(f, where)
    with jax.set_mesh(on):
        params = jax.device_put(plain, where)
        update = jax.jit(ours.update)
        updates, _ = update(params, placed_state(f, params, f.init(plain)), params)
    close(jax.device_get(updates["w"]), -0.2 * expected)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
def test_an_update_sees_the_mesh_that_is_set(axis_type):
    """Also in a branch, and also if it places nothing."""
    seen, on = [], mesh((8,), axis_type)

    def f(x):
        seen.append(jax.sharding.get_abstract_mesh().shape)
        place = constrained(P(), named=False)
        return jax.lax.cond(
            x[0, 0] < 9.0, lambda x: newton_schulz(place(x)), lambda x: x, x
        )

    tx, plain = optax.stateless(lambda g, _: {"w": f(g["w"])}), draw({"w": (M, N)})
    with jax.set_mesh(on):
        where = places({"w": ROWS}, on)
        ours, params = gx.whole_matrices(tx, where), jax.device_put(plain, where)
        updates, _ = jax.jit(ours.update)(params, ours.init(params), params)
    assert seen
    assert all(dict(shape) == {"x": 8} for shape in seen)
    close(jax.device_get(updates["w"]), newton_schulz(plain["w"]))


def broken(updates, state, params=None, **extra):
    raise KeyError("mine")


def test_an_error_of_an_update_is_raised_by_init():
    where = places({"w": ROWS}, mesh((8,)))
    params = jax.device_put(draw({"w": (M, N)}), where)

    def update(updates, state, params=None):
        return broken(updates, state, params)

    tx = optax.GradientTransformation(optax.tree.zeros_like, update)
    with pytest.raises(KeyError, match="mine"):
        gx.whole_matrices(tx, where).init(params)
    tx = optax.GradientTransformationExtraArgs(optax.tree.zeros_like, broken)
    with pytest.warns(
        RuntimeWarning, match="extra arguments.*KeyError: 'mine'"
    ) as all_:
        state = gx.whole_matrices(tx, where).init(params)
    assert [x.filename for x in all_] == [__file__]
    chex.assert_trees_all_equal(state, tx.init(params))

    def named(updates, state, params=None, *, value):
        return broken(updates, state, params)

    tx = optax.GradientTransformationExtraArgs(optax.tree.zeros_like, named)
    with pytest.warns(RuntimeWarning, match="extra arguments.*TypeError: .* 'value'"):
        gx.whole_matrices(tx, where).init(params)
    wrong = gx.whole_matrices(muon(0.1), {"v": where["w"]})
    with pytest.raises(TypeError, match="shardings"):
        wrong.init(params)


def test_init_knows_no_loss():
    """A line search says that it needs one, so nobody is warned."""
    where = places({"w": ROWS}, mesh((8,)))
    params = jax.device_put(draw({"w": (M, N)}), where)
    search = optax.scale_by_backtracking_linesearch(3)
    tx = optax.chain(each_matrix(newton_schulz), search)
    state = gx.whole_matrices(tx, where).init(params)
    chex.assert_trees_all_equal(state, tx.init(params))


@pytest.mark.parametrize("axis_type", TYPES, ids=["automatic", "explicit"])
def test_twice_is_refused(axis_type):
    where = places(TWO[1], mesh((8,), axis_type))
    with pytest.raises(TypeError, match="inside of another whole_matrices"):
        on_mesh(gx.whole_matrices(muon(0.1), where), *TWO, (8,), axis_type)


@pytest.mark.parametrize("said", [True, False], ids=["said", "not said"])
def test_updates_without_a_type_name_the_context(said):
    """``jax.jit`` of ``init`` outside of a mesh gives zeros that lie on one device.

    JAX 0.10 refuses it itself, in the same words.
    """
    where = places(TWO[1], mesh((8,), AxisType.Explicit))
    params = jax.device_put(draw(TWO[0]), where)
    inner = each_matrix(newton_schulz)
    ours = gx.whole_matrices(inner, where if said else None)
    tx = optax.MultiSteps(ours, 2).gradient_transformation()
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)


def test_what_is_no_transformation_is_refused():
    with pytest.raises(TypeError, match="inner"):
        gx.whole_matrices(muon)


def core_of(f, *shapes):
    """The core of a function, what it reads, and which argument that is."""
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with unplaced.tracing():
        closed = jax.make_jaxpr(f)(*types)
    jaxpr = closed.jaxpr
    lying = cores.Lying({}, jaxpr.invars[:1], set, {}, lambda *_: False)
    (core,), _ = cores.TracedUpdate(closed).cores(lying)
    (read,) = filter(core.is_array, core.reads)
    number = [k for k, x in enumerate(jaxpr.invars) if x is read]
    return core, read.aval.dtype, number[0] if number else None


def axes_of(core):
    """The axes of matrices of what it reads."""
    pairs = zip(core.reads, cores.matrices(core).reads, strict=True)
    (axes,) = [axes for x, axes in pairs if core.is_array(x)]
    return axes


def test_a_core_begins_where_it_reads_least():
    """A norm and a cast are inside, a sum of two arrays outside."""

    def f(m, g):
        x = (0.9 * m + g).astype(jnp.bfloat16).astype(jnp.float32)
        return newton_schulz(x)

    _, dtype, number = core_of(f, (M, N), (M, N))
    assert (dtype, number) == (jnp.bfloat16, None)
    _, _, number = core_of(lambda m: newton_schulz(0.9 * m), (M, N))
    assert number == 0


@pytest.mark.parametrize("casts_first", [True, False])
def test_casts_and_reshapes_in_any_order(casts_first):
    """What travels has 16 bits."""

    def half(x):
        return x.astype(jnp.bfloat16)

    def f(x):
        x = half(x)[None] if casts_first else half(x[None])
        x = jax.vmap(newton_schulz)(x)
        return x.astype(jnp.float32)[0] if not casts_first else x[0].astype("float32")

    def other(x):
        x = half(x[None]) if casts_first else half(x)[None]
        return jax.vmap(newton_schulz)(x)[0].astype(jnp.float32)

    for function in (f, other):
        core, dtype, _ = core_of(function, (M, N))
        (made,) = core.makes
        assert dtype == made.aval.dtype == jnp.bfloat16


def test_a_core_keeps_its_matrices_apart():
    """A norm over all layers stays outside of it, one of each layer is inside."""

    def over_all(x):
        return jax.vmap(lambda x: x @ x.T @ x)(x / jnp.linalg.norm(x))

    def of_each(x):
        return jax.vmap(lambda x: x @ x.T @ x / jnp.linalg.norm(x))(x)

    for f, inside in ((over_all, None), (of_each, 0)):
        core, _, number = core_of(f, (8, M, N))
        assert axes_of(core) == (0,)
        assert number == inside


@pytest.mark.parametrize("order", [*itertools.permutations("LEH")])
def test_axes_of_matrices_are_found_in_any_order(order):
    """Of layers, experts and heads, wherever they are and however they are merged."""
    sizes = {"L": 2, "E": 3, "H": 4, "m": 16, "n": 8}
    axes = "".join(order[:1]) + "m" + "".join(order[1:]) + "n"

    def f(x):
        x = jnp.einsum(f"{axes}->LEHmn", x).reshape(-1, sizes["m"], sizes["n"])
        x = jax.vmap(newton_schulz)(x)
        x = x.reshape(2, 3, 4, 16, 8)
        return jnp.einsum(f"LEHmn->{axes}", x)

    core, *_ = core_of(f, [sizes[axis] for axis in axes])
    found = {axes[axis] for axis in axes_of(core)}
    assert found == {*"LEH"}


@pytest.mark.slow
def test_a_state_lies_like_its_parameter():
    """A late gradient comes from the state alone, whose place ``jit`` does not say."""

    def of_momentum(updates, state, params=None):
        del params
        return jax.tree.map(newton_schulz, state), updates

    tx = optax.GradientTransformation(optax.tree.zeros_like, of_momentum)
    shapes, specs = {"w": (M, N), "v": (M, N)}, {"w": ROWS, "v": ROWS}
    check(tx, shapes, specs, moved=2 / 8 * 8 / 2, groups=2)


@pytest.mark.slow
@pytest.mark.parametrize("said", [True, False], ids=["said", "not said"])
def test_an_axis_of_each_kind(said):
    """Types name the explicit axis alone."""
    on = jax.make_mesh((4, 2), ("x", "y"), axis_types=(*TYPES[::-1],))
    where = places({"w": P("x", "y"), "v": P("x", "y"), "b": P()}, on)
    plain, tx = draw(TWO[0]), muon(0.1)
    params = jax.device_put(plain, where)
    ours = gx.whole_matrices(tx, where if said else None)
    args = params, tx.init(plain), params
    if not said:
        with pytest.raises(ValueError, match="needs shardings here"):
            jax.eval_shape(ours.update, *args)
        return
    update = jax.jit(ours.update)
    updates, _ = update(*args)
    close(jax.device_get(updates), expected_updates(plain))
    assert jax.typeof(updates["w"]).sharding.spec == P("x", None)
    kinds, _ = collectives(update.lower(*args).compile())
    assert kinds == {"all-to-all": 2}


CONSTANT = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


@pytest.mark.parametrize("number", [5, 8])
@pytest.mark.parametrize("last", ["alone", "after products"])
@pytest.mark.parametrize("spec", [P(), P(None, "x")])
def test_the_last_product_is_that_of_a_constant_and_a_stack(number, last, spec):
    """Then rows of the constant stand alone, too, but each device has all of it."""

    def update(g):
        if last == "after products":
            g = g @ jnp.swapaxes(g, -1, -2) @ g
        return jnp.asarray(CONSTANT) @ g

    there = NamedSharding(mesh([8]), spec)
    tx = gx.whole_matrices(optax.stateless_with_tree_map(lambda g, _: update(g)), there)
    g = draw({"w": (number, 8, 16)})["w"]
    got = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(jax.device_put(g, there))
    np.testing.assert_allclose(got, update(g), rtol=1e-4, atol=1e-4)


def factors(p, axes):
    return [jnp.eye(p.shape[axis]) for axis in axes]


def factors_of_groups():
    """Rows of one group of parameters, columns of the other one."""
    groups = {
        name: optax.GradientTransformation(
            lambda params, axis=axis: jax.tree.map(
                lambda p: factors(p, [axis]), params
            ),
            optax.identity().update,
        )
        for axis, name in enumerate(["rows", "columns"])
    }
    labels = {name: "columns" if name in "bd" else "rows" for name in "abcde"}
    return optax.partition(groups, labels).init


# An ``init``, and how many parameters it sees beside a trace or two of all.
STATES = {
    "factors": (lambda params: jax.tree.map(lambda p: factors(p, [0, 1]), params), 3),
    "of groups": (factors_of_groups(), 4),
    "no placeholder": (lambda p: {k: factors(x, [0, 1]) for k, x in p.items()}, 5),
    "of all parameters": (
        lambda params: jnp.zeros(sum(p.size for p in jax.tree.leaves(params))),
        5,
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("name", STATES)
def test_of_equal_parameters_one_says_where_a_state_lies(name):
    """Where nobody says where a state lies, it is as ``abstract_state`` says."""
    init, most = STATES[name]
    by_rows, by_columns = (NamedSharding(mesh([8]), spec) for spec in (ROWS, COLUMNS))
    where = dict.fromkeys("abce", by_rows) | {"d": by_columns}
    shapes = dict.fromkeys("abcd", (16, 16)) | {"e": (16, 24)}
    params = jax.tree.map(
        lambda shape, there: jax.ShapeDtypeStruct(shape, "float32", sharding=there),
        *(shapes, where),
        is_leaf=is_shape,
    )
    like = gx.abstract_state(
        optax.GradientTransformation(init, optax.identity().update), params
    )
    seen = []

    def counted(params):
        seen.append(len(jax.tree.leaves(params)))
        return init(params)

    def step(grads, state):
        args = grads, grads, state, {}
        placed = placements.found(counted, args, where)
        start = 2 * len(jax.tree.leaves(grads))
        assert start not in placed.names
        names = [placed.likely()[start + n] for n in range(len(jax.tree.leaves(state)))]
        for found, x in zip(names, jax.tree.leaves(like), strict=True):
            there = NamedSharding(by_rows.mesh, placements.spec_of(found))
            assert there.is_equivalent_to(x.sharding, x.ndim)

    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    jax.eval_shape(step, jax.tree.map(lambda p: jnp.zeros(p.shape), params), state)
    assert max(seen) <= most
