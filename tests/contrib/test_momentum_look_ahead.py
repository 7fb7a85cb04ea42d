"""Momentum look-ahead and HeLoCo: the cases of the correction, and hard ones."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradxform as gx
from tests import in_numpy, oracles
from tests.contrib.test_delayed_nesterov import draw
from tests.in_numpy import Program

ALIGN = gx.contrib.MomentumAlignment()
RATES = 0.1 * 0.98 ** np.arange(50, dtype=np.float32)


def schedule(count):
    return jnp.asarray(RATES)[count]


def at_an_angle(m, cosine, length, seed=0):
    """A gradient of this length, at this cosine to the momentum."""
    m = np.asarray(m, np.float64)
    unit = m / np.linalg.norm(m)
    noise = np.random.default_rng(seed).standard_normal(m.shape)
    across = noise - np.sum(noise * unit) * unit
    across *= np.sqrt(1 - cosine**2) / np.linalg.norm(across)
    return np.float32(length * (cosine * unit + across))


def corrected(g, m, alignment=ALIGN, **kwargs):
    """HeLoCo's G, which acts instead of g. With b1=0 it is the update."""
    tx = gx.contrib.scale_by_momentum_look_ahead(0.0, alignment=alignment, **kwargs)
    state = tx.init(g)._replace(mu=m)
    updates, _ = jax.jit(tx.update)(g, state)
    return updates


@jax.jit  # Compiled once for each shape.
def corrected_by_default(g, m):
    return corrected(g, m)


@pytest.mark.every
@pytest.mark.parametrize(
    ("cosine", "kind"),
    [
        (0.2001, "aligned"),
        (0.1999, "between"),
        (0.0001, "between"),
        (-0.0001, "opposed"),
        (-1.0, "opposed"),
    ],
)
def test_on_either_side_of_the_thresholds(cosine, kind):
    m = draw(30)
    for length in (0.01, 100.0):
        g = at_an_angle(m, cosine, length)
        new = np.float64(corrected_by_default(g, m))
        numbers, wide = ALIGN._asdict(), (np.float64(g), np.float64(m))
        assert oracles.kind(*wide, **numbers) == kind
        expected = oracles.aligned(*wide, **numbers)
        # A gradient that is aligned stays as it is.
        rtol, atol = (0, 0) if kind == "aligned" else (1e-4, 2e-6 * length)
        np.testing.assert_allclose(new, expected, rtol=rtol, atol=atol)


def drawn_alignment(rng):
    """Any numbers in their ranges. A large eps shows wherever it is added."""
    aligned = rng.choice([-0.5, 0.2, 0.5, 1.0])
    opposed = aligned - rng.choice([0.1, 0.4, 2.0])
    confidence, rotation, shrinkage = rng.choice([0, 0.5, 3.0], 3)
    most, eps = rng.choice([0, 0.5, 0.9]), rng.choice([0, 1e-3, 0.25, 0.5])
    numbers = aligned, opposed, confidence, rotation, shrinkage, most, eps
    return gx.contrib.MomentumAlignment(*map(np.float64, numbers))


def test_any_numbers_correct_as_the_formula_says():
    """Of layers that point in all directions, and of some that are 0."""
    rng = np.random.default_rng(0)
    g, m = rng.normal(size=(2, 40, 3)) * rng.choice([0.2, 1, 3], (2, 40, 1))
    g[:4] = [1, 0, 0], [1, 0, 0], [0.5, 0, 0], [0, 0, 0]
    m[:4] = [1, 0, 0], [0, 1, 0], [-0.25, 0, 0], [1, 0, 0]
    g[4:7], m[4:6], m[6] = rng.normal(size=(3, 3)), 0, [1e200, 0, 0]

    def update(g, m, b1, alignment):
        tx = gx.contrib.scale_by_momentum_look_ahead(
            b1, alignment=alignment, stacked_axes=1
        )
        updates, state = tx.update(g, tx.init(g)._replace(mu=m))
        return updates, state.mu

    with jax.enable_x64(), np.errstate(all="ignore"):
        b1, first = np.float64(0.25), drawn_alignment(rng)
        program = Program(jax.make_jaxpr(update)(g, m, b1, first))
        for align in [first, *(drawn_alignment(rng) for _ in range(15))]:
            updates, mu = program(g, m, b1, align)
            numbers = align._asdict()
            new = np.stack(
                [oracles.aligned(*of, **numbers) for of in zip(g, m, strict=True)]
            )
            wanted = 0.25 * m + 0.75 * new
            np.testing.assert_allclose(mu, wanted, rtol=1e-9, err_msg=str(align))
            np.testing.assert_allclose(updates, new + 0.25 * wanted, 1e-9, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_short_gradients_and_momenta_correct_nothing(eps):
    align = gx.contrib.MomentumAlignment(eps=eps)
    m, g, zeros = draw(8), -draw(8, seed=1), jnp.zeros(8)
    short = jnp.full(8, 0.9 * eps / np.sqrt(8))
    for given, held in (
        (zeros, m),
        (g, zeros),
        (short, -m),
        (g, short),
        (zeros, zeros),
    ):
        chex.assert_trees_all_equal(corrected(given, held, align), given)
    longer = -jnp.full(8, 1.2 * eps / np.sqrt(8))
    assert not np.array_equal(corrected(jnp.ones(8), longer, align), jnp.ones(8))
    # One that is 0 in single precision divides nothing by 0.
    align = gx.contrib.MomentumAlignment(eps=1e-60)
    for given, held in ((zeros, m), (m, zeros)):
        chex.assert_trees_all_equal(corrected(given, held, align), given)
    # Squares that overflow leave the gradient as it is.
    large = jnp.full(8, -1e20)
    for given, held in ((large, m), (m, large), (large, -large)):
        chex.assert_trees_all_equal(corrected(given, held), given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_half_precision_are_taken_in_single(dtype):
    """Squares that float16 cannot hold, and sums that stall in bfloat16."""
    m, g = jnp.full(3000, 300, dtype), jnp.full(3000, -300, dtype)
    new = corrected(g, m)  # κ = 1/4, so an eighth is taken off
    assert new.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.float32(new), -300 * 7 / 8, rtol=1e-2)


@pytest.mark.slow
def test_stacked_layers_are_layers():
    m, g = draw(3, 4, 2), draw(3, 4, 2, seed=1)
    alone = jnp.stack([corrected(g[i], m[i]) for i in range(3)])
    got = corrected({"w": g}, {"w": m}, stacked_axes={"w": 1})["w"]
    np.testing.assert_allclose(got, alone, rtol=1e-6)
    assert np.abs(corrected(g, m) - alone).max() > 0.01
    with pytest.raises(ValueError, match=r"stacked_axes must be in \[0, 3\]"):
        gx.contrib.scale_by_momentum_look_ahead(alignment=ALIGN, stacked_axes=4).init(g)


@pytest.mark.parametrize("wild", [np.nan, np.inf])
def test_a_nan_stays_in_its_leaf(wild):
    m, g = draw(4), -draw(4)
    new = corrected(g.at[0].set(wild), m)
    assert np.isfinite(new).tolist() == [False, True, True, True]
    np.testing.assert_array_equal(new[1:], g[1:])


# Where a worker begins.


@functools.partial(jax.jit, static_argnames="tx")
def pushed(tx, params, state, grads, **extra):
    return gx.apply_gradients(tx, grads, state, params, **extra)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_begins_ahead(dtype):
    tx = gx.drop_stale(gx.contrib.momentum_look_ahead(0.5, 0.75, alignment=ALIGN), 2)
    params = {"w": draw(6, dtype=dtype), "b": None}
    state = tx.init(params)
    for t in range(3):
        grads = {"w": draw(6, dtype=dtype, seed=t + 1), "b": None}
        params, state = pushed(tx, params, state, grads, local_step=t)
        mu = np.float64(state.inner_state[0].mu["w"])
        start = in_numpy.jit(gx.contrib.worker_start)(params, state, 0.5, 0.75)
        assert start["b"] is None
        assert start["w"].dtype == jnp.dtype(dtype)
        expected = np.float64(params["w"]) - 0.5 * 0.75 * mu
        rtol = 1e-6 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(np.float64(start["w"]), expected, rtol, rtol)


def test_a_start_is_rounded_once_and_lies_where_the_parameters_do():
    w, m = draw(64, dtype="bfloat16"), draw(64, dtype="bfloat16", seed=1)
    ahead = np.float64(np.float32(0.3) * np.float32(0.7))
    expected = (np.float64(w) - ahead * np.float64(m)).astype(w.dtype)
    for params, mu in ((w, m), gx.on_host((w, m), min_size=1)):
        state = gx.contrib.ScaleByMomentumLookAheadState(mu)
        start = jax.jit(gx.contrib.worker_start)(params, state, 0.3, 0.7)
        np.testing.assert_array_equal(start, expected)
        assert start.sharding == params.sharding


def test_workers_with_another_optimizer_start_at_the_parameters():
    labels = {"w": "outer", "table": "rows"}
    outer = {"outer": gx.contrib.momentum_look_ahead(0.5, 0.5), "rows": gx.adagrad(0.1)}
    tx = optax.partition(outer, labels)
    params = {"w": draw(4), "table": draw(3, 2)}
    state = tx.init(params)
    params, state = gx.apply_gradients(tx, params, state, params)
    start = gx.contrib.worker_start(params, state, 0.5, 0.5)
    chex.assert_trees_all_equal(start["table"], params["table"])
    assert np.abs(start["w"] - params["w"]).min() > 0


def test_a_worker_begins_ahead_in_flax():
    """Its optimizer keeps state in boxes of another kind than the parameters'."""

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(draw(4))

    model = Model()
    tx = gx.contrib.momentum_look_ahead(0.5, 0.5)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda model: jnp.sum(model.w[...] ** 2))(model)
    optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    start = gx.contrib.worker_start(params, optimizer.opt_state, 0.5, 0.5)
    assert jax.tree.structure(start) == jax.tree.structure(params)
    expected = params["w"][...] - 0.5 * 0.5 * draw(4)  # m is half of 2 w.
    np.testing.assert_allclose(start["w"][...], expected, rtol=1e-6)


def begin(learning_rate=0.5, b1=0.9, params=None, state=None):
    one, w = gx.contrib.momentum_look_ahead(0.5), {"w": draw(4)}
    state = one.init(w) if state is None else state.init(w)
    return gx.contrib.worker_start(params or w, state, learning_rate, b1)


def aligned(**numbers):
    alignment = gx.contrib.MomentumAlignment(**numbers)
    return lambda: gx.contrib.momentum_look_ahead(0.1, alignment=alignment)


BOTH = optax.chain(*[gx.contrib.momentum_look_ahead(0.5)] * 2)
ERRORS = [
    (lambda: begin(state=optax.sgd(0.1)), ValueError,
     "holds no ScaleByMomentumLookAheadState"),
    (lambda: begin(state=BOTH), ValueError,
     r"several Scale\w+, at \[0\]\[0\], \[1\]\[0\]"),
    (lambda: begin(schedule), TypeError, "learning_rate must be real, got"),
    (lambda: begin(np.ones(1)), TypeError, "learning_rate must be a real scalar"),
    (lambda: begin(jnp.ones(2)), TypeError, "learning_rate must be a real scalar"),
    (lambda: begin(b1=1.0), ValueError, r"b1 must be in \[0, 1\)"),
    (lambda: begin(params={"w": draw(5)}), TypeError, r"differ at \['w'\]"),
    (lambda: gx.contrib.momentum_look_ahead(0.1, alignment={"eps": 1}), TypeError,
     r"must be a gradxform\.contrib\.Mom"),
    (aligned(aligned=1.5), ValueError,
     r"alignment.aligned must be in \[-1, 1\], got 1.5"),
    (aligned(opposed=0.2), ValueError,
     r"opposed must be below alignment.aligned=0.2, got 0.2"),
    (aligned(confidence=-1.0), ValueError,
     r"alignment.confidence must be in \[0, inf\)"),
    (aligned(rotation=-1.0), ValueError, "alignment.rotation must be in"),
    (aligned(shrinkage=-0.1), ValueError, "alignment.shrinkage must be in"),
    (aligned(max_shrinkage=1.0), ValueError,
     r"alignment.max_shrinkage must be in \[0, 1\)"),
    (aligned(eps=0.0), ValueError, r"alignment.eps must be in \(0, inf\)"),
]  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
