"""Gradients of scanned layers, added to the sum of `accumulate` in the backward pass.

The other way is a step by hand: `jax.value_and_grad`, then `apply_gradients`.
"""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.conftest import NEWEST_JAX

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


def adds(step, *args):
    """Whether the backward pass adds to a sum."""
    return "run_state[" in str(jax.make_jaxpr(step)(*args))


kept = functools.partial(gx.minimize, donate=False)


def same(use, loss=loss, tx=None, makers=(kept, by_hand), **tolerance):
    """``use`` gives the same for a step of ours and for one by hand."""
    close = functools.partial(np.testing.assert_allclose, **tolerance)
    ours, theirs = (use(make(loss, tx or summed())) for make in makers)
    jax.tree.map(close if tolerance else np.testing.assert_array_equal, ours, theirs)
    return ours, theirs


def check(loss, tx, params, batches=X, *, expected=True, has_aux=False, **tolerance):
    makers = [functools.partial(make, has_aux=has_aux) for make in (kept, by_hand)]
    args = params, tx.init(params), batches[0]
    assert adds(makers[0](loss, tx), *args) == (expected and NEWEST_JAX)

    def use(step):
        return run(step, tx, params, batches)

    ours, theirs = same(use, loss, tx, makers, **tolerance)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_float64(reduction):
    """L = mean(x) · Π w, so ∂L/∂w_i = mean(x) · Π w / w_i."""
    rate, w = 0.01, RNG.uniform(0.5, 1.5, LAYERS)

    def product(w, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (h * w, None), x, w)[0])

    each = [np.mean(x, dtype=np.float64) * np.prod(w) / w for x in X[:4]]
    total = np.sum(each, axis=0)
    expected = w - rate * (total / 4 if reduction == "mean" else total)
    outer = summed(optax.sgd(rate), 4, reduction=reduction)
    params, state, _ = run(
        gx.minimize(product, outer), outer, jnp.asarray(w, jnp.float32), X[:4]
    )
    np.testing.assert_allclose(params, expected, rtol=1e-6)
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


def scaled(params, x):
    """The scan goes over the gains, and each layer reads all of them."""

    def body(h, gain):
        return h * gain + jnp.sum(params["gain"]), None

    return jnp.mean(jax.lax.scan(body, x, params["gain"])[0] ** 2)


def twice(params, x):
    def body(h, gains):
        return h * gains[0] + gains[1], None

    both = params["gain"], params["gain"]
    return jnp.mean(jax.lax.scan(body, x, both)[0] ** 2)


def gains():
    return {"gain": jnp.linspace(0.5, 1, LAYERS)}


def cast_before(params, x):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return loss(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


def maybe(params, x):
    return jax.lax.cond(jnp.sum(x) > 0, loss, lambda p, x: jnp.sum(p["out"]), params, x)


def on_the_host(params, x):
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )
    body = jax.checkpoint(layer, policy=policy)
    h, _ = jax.lax.scan(body, x @ params["in"], params["layers"])
    return jnp.mean((h @ params["out"]) ** 2)


def no_layers():
    return model() | {"layers": jax.tree.map(lambda w: w[:0], model()["layers"])}


# Each with the parameters, and whether the backward pass adds to the sum.
LOSSES = {
    "plain": (loss, model, True),
    "jit": (jax.jit(loss), model, True),
    "reverse": (functools.partial(loss, scan=reversed_unrolled), model, True),
    "in groups": (functools.partial(loss, scan=in_groups), grouped, True),
    "dropout": (with_dropout, model, True),
    "custom_vjp": (functools.partial(loss, body=own_derivative), model, True),
    "cast in the layer": (functools.partial(loss, body=in_half), model, True),
    "read elsewhere too": (
        lambda p, x: loss(p, x) + jnp.sum(p["layers"]["up"]),
        model,
        True,
    ),
    "as a constant too": (scaled, gains, False),
    "twice": (twice, gains, False),
    "remat around the scan": (jax.checkpoint(loss), model, False),
    "cast before the scan": (cast_before, model, False),
    "scan in a cond": (maybe, model, False),
    "residuals on the host": (on_the_host, model, False),
    "no layers": (loss, no_layers, False),
}


@pytest.mark.every
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_step_by_hand(name):
    one, params, expected = LOSSES[name]
    check(one, summed(), params(), expected=expected)


def test_a_layer_that_is_read_in_parts():
    """Each part is added by itself, so the sum is rounded more often."""

    def body(h, w):
        first, second = w["up"][:, :WIDTH], w["up"][:, WIDTH:]
        shared = w["up"][0, :WIDTH] * w["up"][jnp.int32(h[0, 0] > 0), :WIDTH]
        return h + jnp.tanh(h @ first) + jnp.tanh(h @ second) + shared[None], None

    one = functools.partial(loss, body=body)
    check(one, summed(optax.sgd(0.1)), model(), rtol=1e-5, atol=1e-6)


def test_aux_and_frozen_leaves():
    def with_aux(params, x):
        return loss(params, x), {"mean": jnp.mean(x)}

    check(with_aux, summed(), model(), has_aux=True)
    params, outer = model() | {"sizes": jnp.array([1, 2])}, summed()
    learns = {"in": False, "out": True, "sizes": False}
    learns |= {"layers": {"up": True, "down": False, "gain": True}}
    step = gx.minimize(loss, outer, trainable=learns, donate=False)
    assert adds(step, params, outer.init(params), X[0]) == NEWEST_JAX

    @jax.jit
    def hand(params, state, x):
        grads = jax.grad(lambda p: loss(p, x))(
            {k: v for k, v in params.items() if k != "sizes"}
        )
        grads = {**grads, "in": None, "sizes": None}
        grads["layers"] |= {"down": None}
        return gx.apply_gradients(outer, grads, state, params)

    ours, theirs = run(step, outer, params), run(hand, outer, params)
    jax.tree.map(np.testing.assert_array_equal, ours[:2], theirs[:2])
    assert ours[0]["layers"]["down"] is not None


@pytest.mark.every
@pytest.mark.parametrize(
    ("dtype", "sums", "expected"),
    [
        ("float32", None, True),
        ("bfloat16", None, False),  # The sums are wider: JAX adds in one dtype.
        ("float32", "bfloat16", False),
        ("complex64", None, True),
    ],
)
def test_dtypes(dtype, sums, expected):
    def real(params, x):
        return jnp.abs(loss(params, x)).astype(jnp.float32)

    outer = summed(optax.sgd(0.125), accumulator_dtype=sums)
    x = X.astype(dtype)
    with jax.numpy_dtype_promotion("standard"):
        check(real, outer, model(dtype), x, expected=expected)


def test_sums_in_bfloat16_are_rounded_before_they_are_divided():
    x = X.astype("bfloat16")
    outer = summed(optax.sgd(0.125), accumulator_dtype="bfloat16")
    check(loss, outer, model("bfloat16"), x, rtol=2**-6, atol=2**-8)


def test_float64():
    with jax.enable_x64(True):
        check(loss, summed(), model(jnp.float64), X.astype(np.float64))


LATE = {"local_step": 0}


@pytest.mark.parametrize(
    ("outer", "extra"),
    [
        (summed(skip_nonfinite=True), {}),
        (gx.conditional_accumulator(gx.adagrad(0.1), 2), LATE),
        (gx.drop_stale(summed(), 1), LATE),
        (gx.adagrad(0.1), {}),
    ],
    ids=["skip_nonfinite", "conditional_accumulator", "drop_stale", "adagrad"],
)
def test_others_see_the_gradients(outer, extra):
    args = model(), outer.init(model()), X[0]
    assert not adds(functools.partial(kept(loss, outer), **extra), *args)
    same(lambda step: step(*args, **extra), tx=outer)


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


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_derivatives_of_a_step(mode):
    """With respect to the parameters before it, which the sum depends on, too."""
    outer = summed(optax.sgd(0.1), 1)

    def use(step):
        def after(params):
            new, *_ = step(params, outer.init(params), X[0])
            return loss(new, X[1])

        return jax.jit(mode(after))(model())

    same(use, tx=outer, rtol=1e-5, atol=1e-7)


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


def test_local_steps():
    outer = summed()
    args = model(), outer.init(model()), X
    _, state, _ = gx.local_steps(loss, outer, donate=False)(*args)
    _, expected, _ = run(by_hand(loss, outer), outer, model())
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    _, part, _ = gx.local_steps(loss, outer, donate=False)(*args, num_steps=3)
    assert part.num_accumulated == 1


def test_without_jit():
    outer = summed()
    with jax.disable_jit():
        ours = run(gx.minimize(loss, outer, donate=False), outer, model(), X[:2])
    theirs = run(by_hand(loss, outer), outer, model(), X[:2])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, ours[0], theirs[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    outer = summed(optax.sgd(0.1))

    def mean_loss(params, x):
        value = loss(params, x)
        return jax.lax.pmean(value, "x") if check_vma else value

    def steps(step):
        def body(params, x):
            pair = params, outer.init(params)
            for _ in range(3):
                *pair, _ = step(*pair, x)
            return jax.tree.map(lambda p: p[None], pair[1].accumulated)

        specs = {"in_specs": (P(), P("x")), "out_specs": P(None if check_vma else "x")}
        return jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)

    assert adds(steps(kept(mean_loss, outer)), model(), X[0]) == NEWEST_JAX
    same(lambda step: jax.jit(steps(step))(model(), X[0]), mean_loss, outer)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_layers(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))

    def product(a, b):
        explicit = {"out_sharding": P()} if kind == AxisType.Explicit else {}
        return jnp.matmul(a, b, **explicit)

    def body(h, w):
        return h + product(jnp.tanh(product(h, w["up"])), w["down"]), None

    def sharded_loss(params, x):
        h, _ = jax.lax.scan(jax.checkpoint(body), x, params)
        return jnp.mean(h**2)

    with jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else contextlib.nullcontext():
        layers = {k: model()["layers"][k] for k in ("up", "down")}
        placed = jax.device_put(layers, NamedSharding(mesh, P(None, None, "x")))
        check(sharded_loss, summed(), placed)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda p, x: loss(p, x)[None], TypeError, "scalar-output"),
        (lambda p, x: jnp.int32(loss(p, x)), TypeError, "real-valued outputs"),
        (lambda p, x: (loss(p, x), 0), TypeError, "scalar-output"),
    ],
)
def test_a_loss_that_is_none_has_jaxs_error(bad, error, message):
    with pytest.raises(error, match=message):
        gx.minimize(bad, summed())(model(), summed().init(model()), X[0])


def test_a_state_of_something_else_has_its_error():
    step = gx.minimize(loss, summed(), donate=False)
    with pytest.raises(TypeError, match="state is not that of tx"):
        step(model(), optax.adam(0.1).init(model()), X[0])
    other = summed().init({"q": jnp.ones(3)})
    with pytest.raises(TypeError, match="accumulated has float32"):
        step(model(), other, X[0])


def weighted(transform, params, batches, weights):
    """A training whose pushes have these weights."""

    def use(step):
        trained = params, transform.init(params)
        for x, weight in zip(batches, weights, strict=True):
            *trained, _ = step(*trained, x, weight=weight)
        return trained

    return use


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_are_in_the_sum(reduction):
    params = model()
    transform = summed(optax.sgd(0.1), PUSHES, reduction=reduction)
    weights = jnp.array([1.0, 0.0, 3.0, 12.0, 0.5])
    batches = jnp.asarray(X).at[1].set(jnp.nan)  # Of no weight.
    step = functools.partial(kept(loss, transform), weight=1.0)
    assert adds(step, params, transform.init(params), X[0]) == NEWEST_JAX
    use = weighted(transform, params, batches, weights)
    ours, _ = same(use, loss, transform, rtol=2e-5, atol=1e-6)
    # w - 0.1 Σ weight g / Σ weight
    grads = [jax.grad(loss)(params, x)["in"] for x in X]
    total = sum(np.float64(w) * g for w, g in zip(weights, grads, strict=True) if w)
    total = total / weights.sum() if reduction == "mean" else total
    expected = params["in"] - 0.1 * total
    np.testing.assert_allclose(ours[0]["in"], expected, rtol=1e-4, atol=1e-6)


def test_a_weight_is_not_rounded_to_the_dtype_of_the_loss():
    params = model(jnp.bfloat16)
    transform = summed(
        optax.sgd(1.0), 2, reduction="sum", accumulator_dtype=jnp.bfloat16
    )
    step = functools.partial(kept(loss, transform), weight=1001.0)
    assert not adds(step, params, transform.init(params), X[0].astype("bfloat16"))


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


@pytest.mark.parametrize("body", [clipping, in_float16])
def test_a_weight_does_not_enter_a_backward_pass_that_is_not_linear(body):
    """A rule clips its gradients, or float16 would overflow."""
    one, params = functools.partial(loss, body=body), model()
    transform, weights = (
        summed(optax.sgd(0.1), PUSHES),
        [1e6, 1e5, 3e6, 12e6, 0.5e6],
    )
    use = weighted(transform, params, X, weights)
    same(use, one, transform, rtol=1e-5, atol=1e-6)
    check(one, transform, params)  # Without a weight the sums are in place.


def test_a_weight_in_double_precision():
    with jax.enable_x64(True):
        params, transform = model(jnp.float64), summed(optax.sgd(0.1))
        use = weighted(transform, params, X[:2].astype(np.float64), [0.1, 0.3])
        same(use, loss, transform, rtol=1e-13)


@pytest.mark.parametrize("weight", [jnp.ones(2), "2", 1j])
def test_a_weight_that_is_none_is_an_error(weight):
    step, params = gx.minimize(loss, summed()), model()
    with pytest.raises(TypeError, match="weight"):
        step(params, summed().init(params), X[0], weight=weight)


@pytest.mark.parametrize("make", [kept, by_hand])
def test_a_weight_below_0_makes_a_compiled_step_nan(make):
    params, transform = model(), summed(optax.sgd(0.1), 1)
    step = make(loss, transform)
    new, *_ = step(params, transform.init(params), X[0], weight=-1.0)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(new))


@pytest.mark.skipif(not NEWEST_JAX, reason="an older JAX takes the other way")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("jax.extend.core", "unsafe_get_axis_names_DO_NOT_USE"),
        ("jax.experimental.pallas", "run_state"),
    ],
)
def test_without_a_name_that_is_not_public_the_numbers_are_the_same(
    module, name, monkeypatch
):
    monkeypatch.delattr(importlib.import_module(module), name)
    check(loss, summed(), model(), expected=False)
