"""Micro-batches of scanned layers: `minimize(layers=...)` with `accumulate`.

The other way is a step by hand: `jax.value_and_grad`, then `apply_gradients`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx

LAYERS, WIDTH, PUSHES = 4, 8, 5
RNG = np.random.default_rng(0)
X = RNG.standard_normal((PUSHES, 4, WIDTH)).astype(np.float32)


def model(dtype=jnp.float32):
    rng = np.random.default_rng(1)

    def draw(*shape):
        return jnp.asarray(rng.normal(0, 0.3, shape), dtype)

    layers = {"up": draw(LAYERS, WIDTH, 16), "down": draw(LAYERS, 16, WIDTH)}
    return {
        "in": draw(WIDTH, WIDTH),
        "layers": layers | {"gain": draw(LAYERS)},
        "out": draw(WIDTH),
    }


def layer(h, w):
    return h + jnp.tanh(h @ w["up"]) @ w["down"] * w["gain"], None


def loss(params, x, body=layer, scan=jax.lax.scan):
    h, _ = scan(jax.checkpoint(body), x @ params["in"], params["layers"])
    return jnp.mean((h @ params["out"]) ** 2)


def by_hand(loss, tx, has_aux=False):
    @jax.jit
    def step(params, state, *batch, **extra):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, *batch)
        result = value if has_aux else (value,)
        return *gx.apply_gradients(tx, grads, state, params, **extra), *result

    return step


def summed(inner=None, n=2, **kwargs):
    return gx.accumulate(inner or gx.adagrad(0.1), n, **kwargs)


def run(step, tx, params, batches=X):
    state, results = tx.init(params), []
    for x in batches:
        params, state, *result = step(params, state, x)
        results.append(result)
    return params, state, results


by_layer = functools.partial(gx.minimize, layers=["layers"], donate=False)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def same(use, loss=loss, tx=None, make=by_layer, tolerance=CLOSE, **how):
    """``use`` gives the same for a step of ours and for one by hand."""
    ours, theirs = (use(m(loss, tx or summed(), **how)) for m in (make, by_hand))
    wide = functools.partial(np.asarray, dtype=np.complex128)
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(wide(x), wide(y), **tolerance)
    return ours, theirs


def check(loss, tx, params, batches=X, tolerance=CLOSE, **how):
    def use(step):
        return run(step, tx, params, batches)

    ours, theirs = same(use, loss, tx, tolerance=tolerance, **how)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_float64(reduction):
    """L = mean(x) · Π w, so ∂L/∂w_i = mean(x) · Π w / w_i."""
    rate, w = 0.01, RNG.uniform(0.5, 1.5, LAYERS)

    def product(params, x):
        last, _ = jax.lax.scan(lambda h, w: (h * w, None), x, params["layers"])
        return jnp.mean(last)

    each = [np.mean(x, dtype=np.float64) * np.prod(w) / w for x in X[:4]]
    total = np.sum(each, axis=0)
    expected = w - rate * (total / 4 if reduction == "mean" else total)
    outer = summed(optax.sgd(rate), 4, reduction=reduction)
    start = {"layers": jnp.asarray(w, jnp.float32)}
    params, state, _ = run(by_layer(product, outer), outer, start, X[:4])
    np.testing.assert_allclose(params["layers"], expected, rtol=1e-6)
    assert state.global_step == 1


def reversed_unrolled(body, x, layers):
    return jax.lax.scan(body, x, layers, reverse=True, unroll=3)


def in_groups(body, x, layers):
    """A scan in a scan, over layers with two axes in front."""
    return jax.lax.scan(lambda h, group: jax.lax.scan(body, h, group), x, layers)


def grouped():
    params = model()
    split = {k: v.reshape(2, 2, *v.shape[1:]) for k, v in params["layers"].items()}
    return params | {"layers": split}


def with_dropout(params, x):
    def body(carry, w):
        h, key = carry
        key, used = jax.random.split(key)
        kept = jax.random.bernoulli(used, 0.9, h.shape)
        return (jnp.where(kept, layer(h, w)[0], 0), key), None

    start = x @ params["in"], jax.random.key(3)
    (h, _), _ = jax.lax.scan(jax.checkpoint(body), start, params["layers"])
    return jnp.mean(h**2)


@jax.custom_vjp
def doubled(h, w):
    return jnp.tanh(h @ w)


doubled.defvjp(
    lambda h, w: (doubled(h, w), (h, w)),
    lambda saved, g: (g @ saved[1].T, 2 * saved[0].T @ g),
)


def own_derivative(h, w):
    return h + doubled(h, w["up"]) @ w["down"] * w["gain"], None


def in_half(h, w):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), w)
    return h + layer(h.astype(jnp.bfloat16), half)[0].astype(h.dtype), None


def cast_before(params, x):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return loss(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


# Each with the parameters.
LOSSES = {
    "plain": (loss, model),
    "jit": (jax.jit(loss), model),
    "reverse": (functools.partial(loss, scan=reversed_unrolled), model),
    "in groups": (functools.partial(loss, scan=in_groups), grouped),
    "dropout": (with_dropout, model),
    "custom_vjp": (functools.partial(loss, body=own_derivative), model),
    "cast in the layer": (functools.partial(loss, body=in_half), model),
    "cast before the scan": (cast_before, model),
}
# In half precision each step may round the loss once more.
HALF = {"rtol": 2e-2, "atol": 1e-3}


@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_step_by_hand(name):
    one, params = LOSSES[name]
    check(one, summed(), params(), tolerance=HALF if "cast" in name else CLOSE)


def test_a_layer_that_is_read_in_parts():
    def body(h, w):
        first, second = w["up"][:, :WIDTH], w["up"][:, WIDTH:]
        shared = w["up"][0, :WIDTH] * w["up"][jnp.int32(h[0, 0] > 0), :WIDTH]
        return h + jnp.tanh(h @ first) + jnp.tanh(h @ second) + shared[None], None

    one = functools.partial(loss, body=body)
    check(one, summed(optax.sgd(0.1)), model())


@pytest.mark.slow
def test_aux_and_frozen_leaves():
    def with_aux(params, x):
        return loss(params, x), {"mean": jnp.mean(x)}

    check(with_aux, summed(), model(), has_aux=True)
    params, outer = model() | {"sizes": jnp.array([1, 2])}, summed()
    learns = {"in": False, "out": True, "sizes": False}
    learns |= {"layers": {"up": True, "down": False, "gain": True}}
    step = by_layer(loss, outer, trainable=learns)

    @jax.jit
    def hand(params, state, x):
        grads = jax.grad(lambda p: loss(p, x))(
            {k: v for k, v in params.items() if k != "sizes"}
        )
        grads = {**grads, "in": None, "sizes": None}
        grads["layers"] |= {"down": None}
        return gx.apply_gradients(outer, grads, state, params)

    ours, theirs = run(step, outer, params), run(hand, outer, params)
    close = functools.partial(np.testing.assert_allclose, **CLOSE)
    jax.tree.map(close, ours[:2], theirs[:2])
    np.testing.assert_array_equal(ours[0]["layers"]["down"], params["layers"]["down"])


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [("bfloat16", None), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_half_precision(dtype, sums):
    outer = summed(optax.sgd(0.125), accumulator_dtype=sums)
    tolerance = {"rtol": 2**-6, "atol": 2**-7}
    with jax.numpy_dtype_promotion("standard"):
        check(loss, outer, model(dtype), X.astype(dtype), tolerance)


def test_float64():
    with jax.enable_x64(True):
        check(loss, summed(), model(jnp.float64), X.astype(np.float64), {"rtol": 1e-12})


@pytest.mark.slow
@pytest.mark.parametrize("names", [{}, {"axis_name": "i"}], ids=["no name", "a name"])
def test_vmap(names):
    """A model for each entry; a loss that reads the axis has to see its name."""

    def shared(params, x):
        value = loss(params, x)
        return value + jax.lax.pmean(value, "i") if names else value

    def use(step):
        params = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), model())
        trained = params, jax.vmap(summed().init)(params)
        for x in (X[:2], X[2:4], X[1:3]):
            *trained, _ = jax.vmap(step, **names)(*trained, x)
        return trained

    same(use, shared)


def micro_batches(step):
    def steps(params, state, x):
        def push(carry, x):
            *carry, value = step(*carry, x)
            return tuple(carry), value

        return jax.lax.scan(push, (params, state), x)

    return steps


def conditional(step):
    def steps(params, state, x):
        return jax.lax.cond(
            jnp.sum(x) < 0, lambda: (params, state), lambda: step(params, state, x)[:2]
        )

    return steps


@pytest.mark.parametrize("around", [micro_batches, conditional])
def test_inside_of_a_program(around):
    outer = summed()
    args = model(), outer.init(model()), X if around is micro_batches else X[0]
    same(lambda step: jax.jit(around(step))(*args))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_layers(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))

    def product(a, b):
        explicit = {"out_sharding": P()} if kind == AxisType.Explicit else {}
        return jnp.matmul(a, b, **explicit)

    def body(h, w):
        return h + product(jnp.tanh(product(h, w["up"])), w["down"]), None

    def sharded_loss(params, x):
        h, _ = jax.lax.scan(jax.checkpoint(body), x, params["layers"])
        return jnp.mean(h**2)

    with jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else contextlib.nullcontext():
        layers = {k: model()["layers"][k] for k in ("up", "down")}
        placed = jax.device_put(layers, NamedSharding(mesh, P(None, None, "x")))
        check(sharded_loss, summed(), {"layers": placed})


def weighted(transform, params, batches, weights):
    """A training whose pushes have these weights."""

    def use(step):
        trained = params, transform.init(params)
        for x, weight in zip(batches, weights, strict=True):
            *trained, _ = step(*trained, x, weight=weight)
        return trained

    return use


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_are_in_the_sum(reduction):
    params = model()
    transform = summed(optax.sgd(0.1), PUSHES, reduction=reduction)
    weights = jnp.array([1.0, 0.0, 3.0, 12.0, 0.5])
    batches = jnp.asarray(X).at[1].set(jnp.nan)  # Of no weight.
    use = weighted(transform, params, batches, weights)
    ours, _ = same(use, loss, transform)
    # w - 0.1 Σ weight g / Σ weight
    grads = [jax.grad(loss)(params, x)["in"] for x in X]
    total = sum(np.float64(w) * g for w, g in zip(weights, grads, strict=True) if w)
    total = total / weights.sum() if reduction == "mean" else total
    expected = params["in"] - 0.1 * total
    np.testing.assert_allclose(ours[0]["in"], expected, rtol=1e-4, atol=1e-6)


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def clipping(h, w):
    h, _ = layer(h, w)
    return clipped(h), None


def in_float16(h, w):
    w = jax.tree.map(lambda x: x.astype(jnp.float16), w)
    return layer(h.astype(jnp.float16), w)[0].astype(jnp.float32), None


@pytest.mark.slow
@pytest.mark.parametrize("body", [clipping, in_float16])
def test_a_weight_does_not_enter_the_backward_pass(body):
    """A rule clips its gradients, or float16 would overflow."""
    one, params = functools.partial(loss, body=body), model()
    transform, weights = (
        summed(optax.sgd(0.1), PUSHES),
        [1e6, 1e5, 3e6, 12e6, 0.5e6],
    )
    use = weighted(transform, params, X, weights)
    same(use, one, transform)


def test_a_weight_in_double_precision():
    with jax.enable_x64(True):
        params, transform = model(jnp.float64), summed(optax.sgd(0.1))
        use = weighted(transform, params, X[:2].astype(np.float64), [0.1, 0.3])
        same(use, loss, transform, tolerance={"rtol": 1e-13})


@pytest.mark.parametrize("weight", [jnp.ones(2), "2", 1j])
def test_a_weight_that_is_none_is_an_error(weight):
    step, params = by_layer(loss, summed()), model()
    with pytest.raises(TypeError, match="weight"):
        step(params, summed().init(params), X[0], weight=weight)


@pytest.mark.parametrize("make", [by_layer, by_hand])
def test_a_weight_below_0_makes_a_compiled_step_nan(make):
    params, transform = model(), summed(optax.sgd(0.1), 1)
    step = make(loss, transform)
    new, *_ = step(params, transform.init(params), X[0], weight=-1.0)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(new))
