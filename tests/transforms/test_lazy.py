"""``lazy`` gives what the inner optimizer gives on rows that the test takes."""

import functools
import pathlib
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import jaxprs
from gradxform._rows import by_row, stored_rows
from gradxform._slices import slices
from gradxform._trees import maps
from tests.conftest import half
from tests.test_optax_all import FOUND, QUICK, WITHOUT_VALUE
from tests.training.losses import pairs

pytestmark = pytest.mark.usefixtures("standard_promotion")

HEIGHT, WIDTH = 9, 3
STEPS = 400  # Until D-adaptation has a distance.
# Each push has repeated rows or padding, which is the row 9.
PUSHES = ([3, 7, 3, 1], [0, 3, 9, 7], [8, 9, 8, 1])


def draw(seed, *shape, dtype="float32"):
    numbers = np.random.default_rng(seed).standard_normal((2, *shape))
    dtype = jnp.dtype(dtype)
    if dtype.kind == "c":
        return jnp.asarray(numbers[0] + 1j * numbers[1], dtype)
    return jnp.asarray(numbers[0], dtype)


def params_of(dtype="float32"):
    """Two tables of one shape and a dense leaf, in a nested tree."""
    shape = HEIGHT, WIDTH
    tables = {"a": draw(0, *shape, dtype=dtype), "b": draw(1, *shape, dtype=dtype)}
    return {"tables": tables, "dense": [draw(2, 4, dtype=dtype)]}


def rows(indices, seed, dtype="float32"):
    values = draw(seed, len(indices), WIDTH, dtype=dtype)
    return gx.IndexedSlices(indices, values, (HEIGHT, WIDTH))


def pushes(dtype="float32"):
    for t, indices in enumerate(PUSHES):
        a, b = rows(indices, 10 + t, dtype), rows([*indices, 2], 20 + t, dtype)
        yield {"tables": {"a": a, "b": b}, "dense": [draw(30 + t, 4, dtype=dtype)]}


def is_sparse(node):
    return isinstance(node, gx.IndexedSlices)


def touched(g):
    """The rows of a gradient, each once and without padding, and their sums."""
    indices = np.asarray(g.indices)
    which = np.unique(indices[indices < g.dense_shape[0]])
    total = np.zeros((g.dense_shape[0] + 1, *g.dense_shape[1:]), g.dtype)
    np.add.at(total, indices, np.asarray(g.values))
    return which, total[which]


def padded(g, to=None):
    """The same with zeros up to the number of given rows, or another number."""
    which, sums = touched(g)
    more = (to or len(g.indices)) - len(which)
    return which, np.concatenate([sums, np.zeros((more, *sums.shape[1:]), g.dtype)])


def by_hand(tx, grads, state, params, take=touched, **extra):
    """``tx`` on rows that this function takes and puts back, with NumPy alone."""
    taken = {"a": take(grads["tables"]["a"]), "b": take(grads["tables"]["b"])}

    def name_of(path):
        names = [getattr(key, "key", None) for key in path]
        return names[-1] if "tables" in names else None

    def take_leaf(path, x):
        if (name := name_of(path)) is None:
            return x
        which, sums = taken[name]
        more = np.zeros((len(sums) - len(which), *np.shape(x)[1:]), x.dtype)
        return jnp.asarray(np.concatenate([np.asarray(x)[which], more]))

    def put_leaf(path, old, new):
        if (name := name_of(path)) is None:
            return new
        which, whole = taken[name][0], np.array(old)
        whole[which] = np.asarray(new)[: len(which)]
        return jnp.asarray(whole)

    sums = {name: jnp.asarray(taken[name][1]) for name in taken}
    updates, new_state = tx.update(
        {"tables": sums, "dense": grads["dense"]},
        jax.tree.map_with_path(take_leaf, state),
        jax.tree.map_with_path(take_leaf, params),
        **extra,
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = jax.tree.map_with_path(put_leaf, zeros, updates)
    return updates, jax.tree.map_with_path(put_leaf, state, new_state)


def dense(tree):
    return jax.tree.map(
        lambda u: u.densify() if is_sparse(u) else u, tree, is_leaf=is_sparse
    )


def check_steps(tx, dtype="float32", take=touched, rtol=2e-6, **extra):
    """Three steps of ``lazy(tx)`` beside the same by hand."""
    params = params_of(dtype)
    lazy = gx.lazy(tx)
    state = lazy.init(params)
    chex.assert_trees_all_equal(state, tx.init(params))
    for grads in pushes(dtype):
        wanted, wanted_state = by_hand(tx, grads, state, params, take, **extra)
        updates, state = lazy.update(grads, state, params, **extra)
        got = dense(updates), state
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, wanted_state)
        wide = functools.partial(jax.tree.map, numbers)
        chex.assert_trees_all_close(
            wide(got), wide((wanted, wanted_state)), rtol=rtol, atol=rtol / 10
        )
        params = gx.apply_updates(params, updates)


def numbers(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
    return np.asarray(x).astype(wide)


# Every optimizer of optax, and the table on the page.

# Noise is drawn for all given rows, and a mean counts the rows of the whole table.
ALL = FOUND | {"optax.clip_by_block_rms": optax.clip_by_block_rms(0.1)}
PAGE = pathlib.Path(__file__).parents[2] / "docs/sparse.md"
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in ALL
]


def listed():
    """The kind of each name in the table on the page."""
    text = PAGE.read_text().partition("## Any optimizer")[2].partition("\n## ")[0]
    kinds = {}
    for kind, names in re.findall(
        r"^\| (alone|together|refused):[^|]*\| (.+) \|$", text, re.M
    ):
        for name in re.findall(r"`([\w.]+)`", names):
            assert kinds.setdefault(f"optax.{name}", kind) == kind
    return kinds


LISTED = listed()


def kind_of(name):
    """Whether a row's steps depend on the other rows, or whether it is refused."""
    lazy = gx.lazy(ALL[name])
    extra = {} if name in WITHOUT_VALUE else {"value": jnp.float32(1.0)}

    @jax.jit
    def third_row(scale):
        def step(both, _):
            params, state = both
            updates, state = lazy.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
            return (params, state), params[3]

        others = jnp.array([1, 7])
        params = draw(0, HEIGHT, WIDTH).at[others].multiply(scale)
        g = rows([3, 7, 3, 1], 1)
        grads = maps.with_values(g, g.values.at[jnp.array([1, 3])].multiply(scale))
        return jax.lax.scan(step, (params, lazy.init(params)), length=STEPS)[1]

    try:
        ends = map(third_row, (1.0, 50.0))
        return "alone" if np.array_equal(*ends, equal_nan=True) else "together"
    except TypeError as error:
        if "gradxform.lazy runs its inner" not in str(error):
            raise
        return "refused"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_of_optax_acts_on_the_rows_as_on_a_table(name):
    kind = kind_of(name)
    assert LISTED[name] == kind
    if kind != "refused":
        extra = {} if name in WITHOUT_VALUE else {"value": jnp.float32(1.0)}
        take = touched
        if name in ("optax.add_noise", "optax.noisy_sgd"):
            take = padded
        elif "block_rms" in name:
            take = functools.partial(padded, to=HEIGHT)
        tx = optax.with_extra_args_support(ALL[name])
        check_steps(tx if extra else ALL[name], take=take, rtol=1e-5, **extra)


# The formula, and what stays.


def lazy_adam(table, gradients, rate, b1, b2, eps):
    """LazyAdam in float64: one count for all rows."""
    table = np.array(table, np.float64)
    mu, nu = np.zeros_like(table), np.zeros_like(table)
    for t, g in enumerate(gradients, 1):
        which, sums = touched(g)
        mu[which] = b1 * mu[which] + (1 - b1) * sums
        nu[which] = b2 * nu[which] + (1 - b2) * np.abs(sums) ** 2
        m, v = mu[which] / (1 - b1**t), nu[which] / (1 - b2**t)
        table[which] -= rate * m / (np.sqrt(v) + eps)
        yield table, mu, nu


@pytest.mark.parametrize(("n", "dtype"), pairs([0, 5, 40], ["float32", "bfloat16"]))
def test_adam_by_the_row_is_the_formula_of_lazy_adam(n, dtype):
    """With more rows than the table has, too, and with padding among them."""
    rng = np.random.default_rng(n)
    tx = gx.lazy(optax.adam(0.1, b1=0.8, b2=0.9, eps=1e-3))
    params = draw(0, HEIGHT, WIDTH, dtype=dtype)
    given = [rows(rng.integers(0, HEIGHT + 1, n), 50 + t, dtype) for t in range(4)]
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    state = tx.init(params)
    wide = [maps.with_values(g, np.asarray(g.values, np.float64)) for g in given]
    tol = {"float32": 2e-6, "bfloat16": 6e-2}[dtype]
    formula = lazy_adam(params, wide, 0.1, 0.8, 0.9, 1e-3)
    for g, expected in zip(given, formula, strict=True):
        params, state = step(g, state, params)
        got = params, state[0].mu, state[0].nu
        for x, wanted in zip(got, expected, strict=True):
            assert x.dtype == dtype
            np.testing.assert_allclose(numbers(x), wanted, rtol=tol, atol=tol)


def bits(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize(
    ("dtype", "donated"), pairs(["float32", "bfloat16", "float16"], [(), (0, 1)])
)
def test_untouched_rows_stay_to_the_bit(dtype, donated):
    """NaN, inf and minus zero in them reach nothing, also through padding."""
    tx = gx.lazy(optax.adamw(0.1, eps=0.0, weight_decay=0.1))
    odd = jnp.asarray([[jnp.nan, -jnp.inf, -0.0]] * HEIGHT, dtype)
    at = jnp.array([1, 4])
    params = odd.at[at].set(1)
    odd_state = tx.init(params)
    state = jax.tree.map(lambda s: odd.at[at].set(s[at]) if s.ndim else s, odd_state)
    before = jax.tree.map(bits, [x for x in jax.tree.leaves([params, state]) if x.ndim])
    g = gx.IndexedSlices([4, 9, 1, 9], jnp.ones((4, WIDTH), dtype), params.shape)

    @functools.partial(jax.jit, donate_argnums=donated)
    def step(params, state, g):
        return gx.apply_gradients(tx, g, state, params)

    after = [x for x in jax.tree.leaves(step(params, state, g)) if x.ndim]
    others = np.setdiff1d(np.arange(HEIGHT), at)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(bits(new)[others], old[others])
        assert np.all(np.isfinite(np.float32(new)[at]))
        assert np.all(bits(new)[at] != old[at])


def test_parameters_of_another_shape_are_named_and_none_are_needed():
    tx, table = gx.lazy(optax.sgd(0.1)), draw(0, HEIGHT, WIDTH)
    grads, state = rows([3, 1], 0), tx.init(table)
    with pytest.raises(TypeError, match=r"^updates and params differ at the root: .*f"):
        tx.update(grads, state, table[1:])
    updates, _ = jax.eval_shape(tx.update, grads, state)
    assert updates.shape == table.shape
    # The state of a part of a table is that of a table of its rows.
    part = gx.TableRows([3], table[:1], (HEIGHT, WIDTH))
    assert isinstance(gx.lazy(optax.trace(0.9)).init(part).trace, jax.Array)


@pytest.mark.slow
def test_padding_gives_zero_updates():
    """Adam without epsilon divides 0 by 0 there."""
    tx = gx.lazy(optax.adam(0.1, eps=0.0))
    params = draw(0, HEIGHT, WIDTH)
    state = jax.jit(tx.init)(params)
    updates, _ = jax.jit(tx.update)(rows([2, 9, 2], 1), state, params)
    assert updates.indices.tolist() == [2, 9, 9]
    assert np.all(updates.values[0] != 0)
    assert not np.any(updates.values[1:])


@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.adafactor(0.1)])
def test_dense_gradients_are_those_of_the_inner_transformation(inner):
    """To the bit, and the states may be exchanged at any step."""
    params, grads = params_of(), params_of()
    lazy = gx.lazy(inner)
    update, other = jax.jit(lazy.update), jax.jit(inner.update)
    state = lazy.init(params)
    for _ in range(2):
        expected = other(grads, state, params)
        got = update(grads, state, params)
        chex.assert_trees_all_equal(got, expected)
        _, state = got


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_tables_of_every_dtype(dtype):
    check_steps(optax.adam(0.1), dtype, rtol=2e-6 if dtype == "complex64" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6,), (5, 2, 2), (1, 3), (0, 3)], ids=str)
def test_tables_of_every_rank(shape):
    tx, params = gx.lazy(optax.adam(0.1)), draw(0, *shape)
    indices = [0, 0, shape[0]]
    g = gx.IndexedSlices(indices, draw(1, 3, *shape[1:]), shape)

    @jax.jit
    def results(g, params):
        before = tx.init(params)
        updates, state = tx.update(g, before, params)
        wanted, _ = optax.adam(0.1).update(g.densify(), before, params)
        return before, updates.densify(), state, wanted

    before, updates, state, wanted = results(g, params)
    np.testing.assert_allclose(updates, wanted, rtol=1e-6)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, before)


# Inside and outside of other transformations.

INSIDE = {
    "chain": optax.chain(optax.clip(0.5), optax.trace(0.9), optax.scale(-0.1)),
    "inject": optax.inject_hyperparams(optax.adam)(0.1),
    "masked": optax.masked(optax.adam(0.1), {"tables": True, "dense": False}),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.adamw(0.1)},
        {"tables": {"a": "a", "b": "b"}, "dense": "b"},
    ),
    "partition by a function": optax.partition(
        {"a": optax.adam(0.1), "b": optax.adamw(0.1)},
        lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree),
    ),
    "if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "row_wise": gx.adagrad(0.1, row_wise=True),
    "global_clipnorm": gx.adagrad(0.1, global_clipnorm=0.5),
    "gate": gx.drop_stale(optax.adam(0.1), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_wrappers_may_be_inside(name):
    check_steps(INSIDE[name], **({"local_step": 1} if name == "gate" else {}))


def ends(tx, given, apply=gx.apply_gradients, **extra):
    """Parameters after these pushes, and the state."""
    params, step = params_of(), jax.jit(functools.partial(apply, tx))
    state = jax.jit(tx.init)(params)
    for grads in given:
        params, state = step(grads, state, params, **extra)
    return params, state


@pytest.mark.slow
def test_a_clip_before_it_takes_the_norm_of_the_summed_rows():
    clip = gx.clip_by_global_norm(0.5)
    both = optax.chain(clip, gx.lazy(optax.adam(0.1)))
    inside = gx.lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)))
    params, _ = ends(both, pushes())
    expected, _ = ends(inside, pushes())
    chex.assert_trees_all_close(params, expected, rtol=1e-5)


@pytest.mark.slow
def test_wrappers_may_be_outside():
    momentum = optax.sgd(0.1, 0.9)
    lazy = gx.lazy(momentum)
    partition = optax.partition(
        {"tables": lazy, "rest": momentum}, {"tables": "tables", "dense": "rest"}
    )
    injected = optax.inject_hyperparams(lambda rate: gx.lazy(optax.sgd(rate, 0.9)))(0.1)
    rate_after = gx.lazy(optax.trace(0.9)), gx.scale_by_learning_rate(0.1)
    gated = gx.drop_stale(lazy, 1)
    expected, _ = ends(lazy, pushes())
    for tx in partition, injected, optax.chain(*rate_after), gated:
        got, _ = ends(tx, pushes(), **({"local_step": 5} if tx is gated else {}))
        chex.assert_trees_all_close(got, expected, rtol=1e-6)


@pytest.mark.slow
def test_extra_arguments_like_the_parameters_lose_the_other_rows_too():
    inner = optax.chain(gx.compensate_delay(0.5), optax.scale(-0.1))
    earlier = jax.tree.map(lambda p: p - 1, params_of())
    got, _ = ends(gx.lazy(inner), pushes(), worker_params=earlier)
    links = gx.compensate_delay(0.5), gx.scale_by_learning_rate(0.1)
    expected, _ = ends(optax.chain(*links), pushes(), worker_params=earlier)
    chex.assert_trees_all_close(got, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["dense", "b"])
def test_a_leaf_without_a_gradient_keeps_its_state(missing):
    tx, params, grads = gx.lazy(optax.adam(0.1)), params_of(), next(pushes())
    where = grads if missing == "dense" else grads["tables"]
    where[missing] = jax.tree.map(lambda _: None, where[missing], is_leaf=is_sparse)
    start = jax.jit(tx.init)(params)
    before = params, start[0].mu
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    after, state = step(grads, start, params)
    for new, old in zip((after, state[0].mu), before, strict=True):
        kept = ((t if missing == "dense" else t["tables"])[missing] for t in (new, old))
        chex.assert_trees_all_equal(*kept)
        assert np.any(new["tables"]["a"] != old["tables"]["a"])


@pytest.mark.slow
def test_boxes_of_flax_stay():
    def boxed(x):
        return nn.Partitioned(x, names=("rows", None))

    tx, params, g = gx.lazy(optax.adam(0.1)), draw(0, HEIGHT, WIDTH), rows([3, 1, 3], 1)
    plain, _ = tx.update({"w": g}, tx.init({"w": params}), {"w": params})
    tree = {"w": boxed(params)}
    updates, state = tx.update({"w": boxed(g)}, tx.init(tree), tree)
    assert isinstance(updates["w"], nn.Partitioned)
    assert isinstance(state[0].mu["w"], nn.Partitioned)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(tree))
    chex.assert_trees_all_equal(updates["w"].value.densify(), plain["w"].densify())


# Sizes, and sums without padding.


def one_table(height=50):
    """Parameters, a function for the gradient of row 3, and that gradient, dense."""
    params, g = {"t": draw(0, height, WIDTH)}, draw(1, 1, WIDTH)

    def grads(*parts):
        values = jnp.concatenate([g * part for part in parts])
        return {"t": gx.IndexedSlices([3] * len(parts), values, (height, WIDTH))}

    return params, grads, dense(grads(1.0))


def by_size(tree):
    return jax.tree.map(lambda x: "big" if x.size > 100 else "small", tree)


def shares():
    return optax.stateless(
        lambda u, p: jax.tree.map(lambda u, p: u / p.shape[0] + u / p.size, u, p)
    )


SIZES = {
    "labels": optax.partition(
        {"big": optax.sgd(0.1), "small": optax.sgd(1.0)}, by_size
    ),
    "mask": optax.masked(
        optax.scale(3.0), lambda tree: jax.tree.map(lambda x: x.size > 100, tree)
    ),
    "decay": optax.chain(
        optax.scale(1.0),
        optax.add_decayed_weights(
            1.0, lambda p: jax.tree.map(lambda x: x.size > 100, p)
        ),
    ),
    "division": shares(),
    "block rms": optax.clip_by_block_rms(0.01),
    "unit norm": optax.adaptive_grad_clip(1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), pairs(SIZES, [1, 2, 50, 51]))
def test_sizes_are_those_of_the_table(name, parts):
    """One row, given once or in parts, also with as many parts as rows, or more."""
    params, grads, whole = one_table()
    tx = SIZES[name]
    # Other rows are zeros, for a norm of the parameters and their decay.
    alone = {"t": np.zeros_like(params["t"])}
    alone["t"][3] = params["t"][3]

    @jax.jit
    def results(grads):
        lazy = gx.lazy(tx)
        updates, _ = lazy.update(grads, lazy.init(params), params)
        return dense(updates)["t"], tx.update(whole, tx.init(params), alone)[0]["t"]

    got, wanted = results(grads(*[1 / parts] * parts))
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-7)


NORMS = {
    "trust": optax.chain(optax.scale_by_adam(eps=0.0), optax.scale_by_trust_ratio()),
    "clip": optax.chain(optax.scale_by_adam(eps=0.0), optax.clip_by_global_norm(0.1)),
    "momo": optax.contrib.momo_adam(0.1, eps=0.0),
    "max": optax.stateless(
        lambda u, _: jax.tree.map(lambda x: x - jnp.max(jnp.exp(-x)), u)
    ),
    "finite": optax.apply_if_finite(optax.scale_by_adam(eps=0.0), 2),
}


ADDED = {
    "sum": (lax.reduce_sum, np.sum),
    "max": (lax.reduce_max, np.max),
    "min": (lax.reduce_min, np.min),
    "prod": (lax.reduce_prod, np.prod),
    "or": (
        lambda x, axes: lax.reduce_or(x > 1, axes),
        lambda x, axis: (x > 1).any(axis),
    ),
    "and": (
        lambda x, axes: lax.reduce_and(x > 1, axes),
        lambda x, axis: (x > 1).all(axis),
    ),
    "dot": (
        lambda x, axes: lax.dot_general(x, x, ((axes, axes), ((), ()))),
        lambda x, axis: np.tensordot(x, x, (axis, axis)),
    ),
}


def test_an_operation_that_adds_up_leaves_out_padding():
    """Rows are the first axis, or the second, or two numbers each of the only one."""
    numbers = np.float32([[0.5, -2], [3, 4], [9, -9], [1.5, 0.25]])
    g = gx.IndexedSlices([1, 6, 6, 3], numbers, (6, 2))
    tables, source = by_row.Rows({(): g}), slices.Source(6, 4)
    cases = [
        (name, x, kept, along)
        for x, kept, along in (
            (numbers, numbers[[0, 3]], slices.Along(0, 1)),
            (numbers.T, numbers[[0, 3]].T, slices.Along(1, 1)),
            (numbers.ravel(), numbers[[0, 3]].ravel(), slices.Along(0, 2)),
        )
        for name in ADDED
    ]

    def added(name, x, _, along):
        f, _ = ADDED[name]
        eqn = jax.make_jaxpr(lambda x: f(x, (along.axis,)))(x).eqns[-1]
        operands = [jnp.asarray(x > 1 if name in ("or", "and") else x)]
        operands *= len(eqn.invars)
        kinds = [slices.Kind(source, along)] * len(operands)
        return tables.policy.add_up(eqn, kinds, operands)[0]

    results = jax.jit(lambda: [added(*case) for case in cases])()
    for found, (name, _, kept, along) in zip(results, cases, strict=True):
        _, wanted = ADDED[name]
        np.testing.assert_allclose(found, wanted(kept, along.axis), rtol=1e-6)


def test_operations_over_a_mesh_are_refused_and_casts_are_not():
    refused = by_row.Rows({}).policy.refused
    assert {"psum", "ppermute", "reshard"} <= refused
    assert refused.isdisjoint({"convert_element_type", "add"})


def test_rows_of_a_summed_gradient_are_not_looked_up():
    given = jnp.array([1, 3]), draw(0, 2, WIDTH), (HEIGHT, WIDTH)
    summed = stored_rows.unchecked(gx.IndexedSlices, *given, summed=True)
    tx = gx.lazy(optax.scale(2.0))
    program = jax.make_jaxpr(lambda: tx.update(summed, optax.ScaleState()))()
    assert not jaxprs.anywhere(program.jaxpr, "gather")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), pairs(NORMS, ["float32", "float16"]))
def test_padding_reaches_no_sum(name, dtype):
    """Adam makes it 0 / 0. The rows by hand have no padding."""
    extra = {"value": jnp.float32(1.0)} if name == "momo" else {}
    rtol = 1e-5 if dtype == "float32" else 4e-3
    check_steps(NORMS[name], dtype, rtol=rtol, **extra)


@pytest.mark.slow
def test_padding_has_no_noise_in_a_norm():
    """The norm is that of the updates themselves."""
    tx = gx.lazy(
        optax.chain(optax.add_noise(1.0, 0.0, 0), optax.clip_by_global_norm(0.1))
    )
    params, grads, _ = one_table()
    updates, _ = tx.update(grads(*[0.1] * 10), tx.init(params), params)
    np.testing.assert_allclose(np.linalg.norm(updates["t"].values), 0.1, rtol=1e-5)


@pytest.mark.slow
def test_an_update_for_one_height_alone():
    """An array of NumPy has its height, and a comparison is that of the table."""
    params, grads, whole = one_table()
    by_hand = optax.stateless(lambda u, _: {"t": u["t"] * np.ones((50, 1), "float32")})
    with pytest.raises(TypeError, match=r"\['t'\], but its update has a constant of"):
        gx.lazy(by_hand).update(grads(1.0), by_hand.init(params), params)
    for height in (49, 50, 51):
        params, grads, whole = one_table(height)
        tx = optax.stateless(
            lambda u, _: {"t": -u["t"] if len(u["t"]) == 50 else 2 * u["t"]}
        )
        updates, _ = gx.lazy(tx).update(grads(1.0), tx.init(params), params)
        wanted, _ = tx.update(whole, tx.init(params), params)
        np.testing.assert_array_equal(updates["t"].densify(), wanted["t"])


# What people write in an update: the dense numbers, or a refusal that says why.


def entries(x):
    return jnp.sum(x, dtype=jnp.float32).astype(x.dtype)


def numpy_rows(x):
    return np.arange(len(x), dtype=x.dtype)[:, None]


def masked_sum(x):
    return x * jnp.sum(numpy_rows(x) * x)


def from_host(f, x, shape):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(shape, x.dtype), x)


@jax.custom_vjp
def with_its_own_gradient(x):
    return 2 * x


with_its_own_gradient.defvjp(lambda x: (2 * x, None), lambda _, g: (g,))


@jax.custom_jvp
def rounded(x):
    """Straight through: its derivative is 1."""
    return jnp.round(x)


rounded.defjvp(lambda x, t: (rounded(*x), *t))

# With a number from all rows.
TOGETHER = {
    "mean": lambda x: x - jnp.mean(x, axis=0),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "any": lambda x: jnp.where(jnp.any(x > 1), x, -x),
    "min": lambda x: x * jnp.min(jnp.cosh(x)),
    "prod": lambda x: x + jnp.prod(jnp.cos(x)),
    "cond": lambda x: jax.lax.cond(entries(x) > 0, jnp.sin, lambda x: x * x, x),
    "dot": lambda x: x * jnp.einsum("ij,ij->", x, x),
    "transposed mean": lambda x: (x.T - x.T.mean(axis=1, keepdims=True)).T,
    "while": lambda x: jax.lax.while_loop(
        lambda c: jnp.sum(c) < 9, lambda c: c + 1 + x * x, x
    ),
    "means in a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, y: jnp.sin(2 * y) - jnp.mean(y, axis=0), x
    ),
}
# By the name of the operation, or by what it does.
UNKNOWN = {
    "scan": lambda x: x * jax.lax.scan(lambda c, r: (c + r.sum(), None), 0.0, x)[0],
    "cumsum in checkpoint": jax.checkpoint(lambda x: x * jnp.cumsum(x, axis=0)),
    "gather": lambda x: x[jnp.arange(len(x))[::-1]],
    "composite": jax.lax.composite(lambda x: x * jnp.cumsum(x, axis=0), name="of.mine"),
    "pure_callback": lambda x: from_host(lambda x: np.asarray(x)[::-1], x, x.shape),
    "pure_callback to a number": lambda x: (
        x * from_host(lambda x: x.dtype.type(len(x)), x, ())
    ),
    "debug_callback": lambda x: jax.debug.callback(lambda _: None, x) or x,
    "sort": lambda x: x - jnp.median(x),
    "reduce": lambda x: x * jax.lax.reduce(x, x.dtype.type(0), jnp.add, (0, 1)),
    "iota": lambda x: x * jax.lax.broadcasted_iota(x.dtype, x.shape, 0),
    "iota transposed": lambda x: (x.T * jnp.arange(len(x), dtype=x.dtype)).T,
    "random_bits of keys": lambda x: (
        x
        * jax.vmap(lambda key: jax.random.normal(key, (1,)))(
            jax.random.split(jax.random.key(0), len(x))
        )
    ),
    "dot_general": lambda x: jnp.einsum("ik,jk->ij", x, x) @ x,
}
CONSTANT = {
    "times": lambda x: x * numpy_rows(x),
    "instead": lambda x: np.zeros(x.shape, x.dtype),
    "sum": masked_sum,
    "jit": jax.jit(lambda x: x * numpy_rows(x)),
    "relu": lambda x: jax.nn.relu(x) * numpy_rows(x),
}


def on_arrays(f):
    return optax.stateless(lambda u, _: jax.tree.map(f, u))


def of_touched_rows(f, indices, height, width, dtype="float32", seed=0):
    """``f`` on the touched rows of a table by ``lazy``, and by the dense gradient."""
    values = draw(seed, len(indices), width, dtype=dtype)
    g = {"t": gx.IndexedSlices(indices, values, (height, width))}
    tx, params = on_arrays(f), {"t": jnp.zeros((height, width), dtype)}
    which = np.unique([i for i in indices if i < height]).astype(int)

    @jax.jit
    def both(g, params):
        lazy = gx.lazy(tx)
        updates, _ = lazy.update(g, lazy.init(params), params)
        return dense(updates), tx.update(dense(g), tx.init(params), params)[0]

    return [np.asarray(updates["t"])[which] for updates in both(g, params)]


FEW, EVERY = [2, 5, 2, 6], [3, 0, 1, 2, 6, 5, 4, 3]  # Of 6 rows; 6 is padding.
ALL_OF_THEM = [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", TOGETHER)
def test_a_sum_over_all_rows_is_the_dense_one(name):
    """The gradient has all rows, some twice, and padding, which is in no sum."""
    got, wanted = of_touched_rows(TOGETHER[name], EVERY, 6, 3)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.every
@pytest.mark.parametrize(("name", "indices"), pairs(UNKNOWN, [FEW, ALL_OF_THEM]))
def test_an_operation_that_is_not_known_by_the_row_is_refused(name, indices):
    """Also if the gradient has as many rows as the table."""
    operation = name.partition(" ")[0]
    with pytest.raises(TypeError, match=rf"may mix rows, by '{operation}'"):
        of_touched_rows(UNKNOWN[name], indices, 6, 3)


@pytest.mark.parametrize(("name", "indices"), pairs(CONSTANT, [FEW, ALL_OF_THEM]))
def test_a_constant_of_the_tables_height_is_refused(name, indices):
    with pytest.raises(TypeError, match=r"a constant of shape \[6, [13]\], which"):
        of_touched_rows(CONSTANT[name], indices, 6, 3)


def both(f):
    """The updates of ``f`` by the row and by a dense gradient, from these rows."""
    tx, params = on_arrays(f), {"t": jnp.zeros((6, 2))}

    def update(tx, given, indices, values):
        g = given({"t": gx.IndexedSlices(indices, values, (6, 2))})
        return dense(tx.update(g, tx.init(params), params)[0])["t"]

    by_row = functools.partial(update, gx.lazy(tx), lambda g: g)
    return by_row, functools.partial(update, tx, dense)


COLLECTIVES = {
    "psum": functools.partial(jax.lax.psum, axis_name="i"),
    "pmax": functools.partial(jax.lax.pmax, axis_name="i"),
    "ppermute": lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]),
    "all_gather": lambda x: jax.lax.all_gather(x, "i").sum(0),
    "all_to_all": lambda x: jax.lax.all_to_all(x[:, :2], "i", 1, 1, tiled=True),
}


@pytest.mark.parametrize(("name", "over"), pairs(COLLECTIVES, ["shard_map", "vmap"]))
def test_rows_of_other_devices_are_refused(name, over):
    """Row 0 of a device would meet row 3 of another."""
    by_row, _ = both(COLLECTIVES[name])

    def update(index):
        return by_row(index, jnp.ones((1, 2)))

    indices = jnp.array([[0], [3]])
    if over == "vmap":
        run = jax.vmap(update, axis_name="i")
    else:
        mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
        run = jax.shard_map(
            lambda i: update(i[0]),
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        )
    with pytest.raises(TypeError, match=r"may mix rows, by '(p|all|slice)"):
        jax.eval_shape(run, indices)


def test_a_number_may_be_summed_over_devices():
    """It is one number for all rows, as without ``lazy``."""
    indices, values = jnp.array([[0], [3]]), jnp.full((2, 1, 2), 2.0)
    got, wanted = (
        jax.jit(jax.vmap(update, axis_name="i"))(indices, values)
        for update in both(lambda x: x * jax.lax.psum(entries(x), "i"))
    )
    np.testing.assert_array_equal(got, wanted)


def by_scan(x):
    return jax.lax.scan(lambda c, y: (c + y, c * y), 0 * x[:, 0], x.T)[1].T


DERIVATIVES = {
    "straight through": lambda x: rounded(1.4 * x),
    "relu at 0": lambda x: x + jax.nn.relu(x - jax.lax.stop_gradient(x)),
    "jit": jax.jit(lambda x: jax.nn.relu(x) * rounded(x)),
    "cond": lambda x: jax.lax.cond(entries(x) > -9, rounded, jnp.sin, x),
    "twice": lambda x: jax.nn.softplus(rounded(x)) * jnp.logaddexp(x, -x),
    "sum": lambda x: rounded(x) * entries(jax.nn.relu(x)),
    "scan": lambda x: by_scan(rounded(x)) * x,
    "fori_loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, y: jnp.sin(y) + i, jax.nn.relu(x)
    ),
    "order": lambda x: jnp.sort(x, 1) * jax.vmap(lambda r: r[jnp.argsort(-r)])(x),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "derive"), pairs(DERIVATIVES, [jax.jacrev, jax.jacfwd])
)
def test_derivatives_through_it_are_the_dense_ones(name, derive):
    wrap = jax.jit if name in ("relu at 0", "twice", "sum", "order") else lambda f: f
    given = jnp.array([4, 0, 6, 1, 2, 3, 5]), draw(3, 7, 2)
    got, wanted = (
        wrap(derive(update, argnums=1))(*given) for update in both(DERIVATIVES[name])
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert np.any(wanted)


def test_a_derivative_that_mixes_rows_is_refused():
    @jax.custom_jvp
    def f(x):
        return 2 * x

    f.defjvp(lambda x, t: (f(*x), jnp.cumsum(*t, axis=0)))

    by_row, _ = both(f)

    def total(values):
        return jnp.sum(by_row(jnp.array([4, 2]), values))

    assert total(jnp.ones((2, 2))) == 8
    with pytest.raises(TypeError, match="may mix rows, by 'cumsum'"):
        jax.grad(total)(jnp.ones((2, 2)))


def test_a_derivative_that_is_not_known_is_refused():
    by_row, _ = both(with_its_own_gradient)
    values = jnp.ones((2, 2))
    for derive in jax.grad, jax.jacfwd:
        with pytest.raises(TypeError, match=r"jvp|may mix rows, by 'custom_lin'"):
            jax.eval_shape(
                derive(lambda x: jnp.sum(by_row(jnp.array([4, 2]), x))), values
            )


@pytest.mark.slow
def test_an_array_like_a_table_that_is_all_parameters_stays_whole():
    def add_sum(u, state, params=None, *, losses):
        return u + jnp.sum(losses), state

    table, losses = jnp.zeros(3), jnp.array([1.0, 2.0, 4.0])
    tx = gx.lazy(optax.GradientTransformationExtraArgs(lambda p: (), add_sum))
    g = gx.IndexedSlices([1], jnp.array([10.0]), (3,))
    updates, _ = tx.update(g, tx.init(table), table, losses=losses)
    assert updates.values.tolist() == [17.0]


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="optax before 0.2.7")
def test_a_monitor_is_refused():
    params, grads, _ = one_table()
    tx = gx.lazy(optax.monitor({"norm": gx.global_norm}))
    with pytest.raises(TypeError, match=r"another structure.*optax\.snapshot"):
        jax.eval_shape(tx.update, grads(1.0), jax.eval_shape(tx.init, params), params)
    tx = gx.lazy(optax.snapshot("norm", gx.global_norm))
    _, state = jax.jit(tx.update)(grads(0.5, 0.5), tx.init(params), params)
    expected = np.linalg.norm(draw(1, 1, WIDTH))
    np.testing.assert_allclose(optax.tree.get(state, "norm"), expected, rtol=1e-6)


# Errors.

SUMS = "adds up several steps"
REFUSED = {
    "novograd": (gx.novograd(0.1), r"\.nu\['t'\] of ScaleByNovogradState, .*no row"),
    "adafactor": (
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        r"\.v_row\['t'\] of FactoredState, .*no row",
    ),
    "sm3": (optax.sm3(0.1), r"\.mu\['t'\]\[1\] of ScaleBySM3State, .*no row"),
    "muon": (optax.contrib.muon(0.1), r"of MuonState, .*mixes the rows"),
    "sam": (
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01)),
        r"\.cache\['t'\] of SAMState, .*same rows",
    ),
    "flatten": (optax.flatten(optax.adam(0.1)), "its init"),
    "accumulate": (
        gx.accumulate(optax.adam(0.1), 2),
        f"ConditionalAccumulatorState, .*{SUMS}",
    ),
    "conditional": (
        gx.conditional_accumulator(optax.adam(0.1), 2),
        f"ConditionalAccumulatorState, .*{SUMS}",
    ),
    "multi_steps": (
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
        f"MultiStepsState, .*{SUMS}",
    ),
    "delayed_nesterov": (
        gx.contrib.delayed_nesterov(0.1, num_delay=2),
        r"\.count\['t'\] of ScaleByDelayedNesterovState, .*no row",
    ),
    "measure_cosine": (
        gx.contrib.measure_cosine(),
        "MeasureCosineState, .*no row",
    ),
    "delayed": (gx.delayed(optax.adam(0.1), 2), "DelayedState, .*no row"),
    "two for each row": (
        optax.GradientTransformation(
            lambda p: jax.tree.map(lambda x: jnp.zeros((2 * len(x), WIDTH)), p),
            lambda u, s, _: (u, s),
        ),
        r"\['t'\], of shape .*no row",
    ),
    "worker_mean": (
        gx.worker_mean(optax.adam(0.1), 2, method="latest"),
        "WorkerMeanState, .*no row",
    ),
}


@pytest.mark.every
@pytest.mark.parametrize(("name", "height"), pairs(REFUSED, [3, 4, HEIGHT]))
def test_state_without_a_row_for_each_row_is_refused(name, height):
    """In a square table, and with as many rows given as the table has, too."""
    inner, message = REFUSED[name]
    tx, params = gx.lazy(inner), {"t": draw(0, height, WIDTH)}
    state = tx.init(params)
    given = {"t": gx.IndexedSlices([0, 1, 0], draw(1, 3, WIDTH), (height, WIDTH))}
    with pytest.raises(TypeError, match=rf"gradxform\.lazy.*\['t'\].*{message}"):
        tx.update(given, state, params, local_step=0, worker=0)


def test_square_factors_are_refused():
    """Each has as many rows as the table, but only one is by the row."""

    def init(params):
        return jax.tree.map(lambda p: (p @ p.T, p.T @ p), params)

    tx = gx.lazy(optax.GradientTransformation(init, lambda u, s, p: (u, s)))
    params = {"t": draw(0, 3, 3)}
    with pytest.raises(TypeError, match=r"\['t'\].*\['t'\]\[0\], of shape \[3, 3\]"):
        tx.update({"t": rows_of_height(3)}, tx.init(params), params)


def test_a_loop_that_each_row_leaves_by_itself():
    def halved(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x / 2, x)

    def each(u, _):
        return jax.vmap(halved)(jax.device_put(u))  # It says no place.

    tx = gx.lazy(optax.stateless(each))
    g = gx.IndexedSlices([3, 0], jnp.float32([[3, 4], [0.5, 0]]), (8, 2))
    params = jnp.zeros((8, 2))
    updates, _ = jax.jit(tx.update)(g, tx.init(params), params)
    wanted = np.zeros((8, 2))
    wanted[3], wanted[0] = [3 / 8, 4 / 8], [0.5, 0]
    np.testing.assert_array_equal(updates.densify(), wanted)


def rows_of_height(height):
    return gx.IndexedSlices([0, 1, 0], draw(1, 3, 3), (height, 3))


def test_a_function_of_whole_parameters_cannot_be_called():
    line_search = optax.scale_by_backtracking_linesearch(5)
    tx, params, grads = gx.lazy(line_search), params_of(), next(pushes())
    extra = {"value": 1.0, "grad": grads, "value_fn": optax.global_norm}
    with pytest.raises(TypeError, match=r"inside of gradxform\.lazy .* value_fn"):
        tx.update(grads, tx.init(params), params, **extra)
    # Others may get it.
    adam = gx.lazy(optax.adam(0.1))
    update = functools.partial(adam.update, **extra)
    jax.eval_shape(update, grads, jax.eval_shape(adam.init, params), params)


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="inner must be an optax"):
        gx.lazy(optax.adam)
    tx, params = gx.lazy(optax.adam(0.1)), {"t": draw(0, HEIGHT, WIDTH)}
    state, wrong = tx.init(params), {"t": rows_of_height(8)}
    with pytest.raises(TypeError, match=r"\['t'\].*float32\[3,3\] for \[8, 3\]"):
        tx.update(wrong, state, params)
    with pytest.raises(TypeError, match=r"\['t'\].*\.mu\['t'\] of ScaleByAdamState"):
        tx.update(wrong, state)
    with pytest.raises(TypeError, match="state is not that of tx: at the root it has"):
        tx.update({"t": rows([1], 1)}, optax.lion(0.1).init(params), params)


# Meshes, servers, parts of tables.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "spec", "in_context"),
    half([AxisType.Auto, AxisType.Explicit], [P("x"), P(None, "x")], [True, False]),
    indirect=["in_context"],
)
def test_tables_may_be_sharded(axis_type, spec, in_context):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    tx, table = gx.lazy(optax.adamw(0.1)), draw(0, 8, 4)
    g = gx.IndexedSlices([5, 0, 5, 8], draw(1, 4, 4), (8, 4))
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    expected = step(g, tx.init(table), table)
    params = jax.device_put(table, NamedSharding(mesh, spec))
    with in_context(mesh):
        state = tx.init(params)
        shardings = [x.sharding for x in (params, state[0].mu, state[0].nu)]
        params, state = step(g, state, params)
    for x, before in zip((params, state[0].mu, state[0].nu), shardings, strict=True):
        assert x.sharding.is_equivalent_to(before, 2) or axis_type is AxisType.Auto
    chex.assert_trees_all_close((params, state), expected, rtol=1e-6)
