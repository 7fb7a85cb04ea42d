"""Updates that loop, multiply, factorize or sort within a layer, by the layer.

The wanted numbers are those of the same optimizer in the ordinary step.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.training.losses import Loss, Way, check, numbered

pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS, WIDTH, HIDDEN = 4, 6, 10
STACKED = {"blocks": 1, "head": 0}
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, WIDTH)), jnp.float32)


def start(layers=LAYERS):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    blocks = {
        "w": draw(layers, WIDTH, HIDDEN),
        "v": draw(layers, HIDDEN, WIDTH),
        "b": draw(layers, WIDTH),
    }
    return {"blocks": blocks, "head": draw(WIDTH, 5)}


def loss_fn(p, x):
    def layer(x, w):
        return x + jnp.tanh(jnp.tanh(x @ w["w"]) @ w["v"] + w["b"]), None

    return jnp.mean((jax.lax.scan(layer, x, p["blocks"])[0] @ p["head"] - 1) ** 2)


def model(layers=LAYERS, stacks=("blocks",)):
    return Loss(loss_fn, stacks, functools.partial(start, layers), (X,), rtol=2e-5)


def trained(tx, params, layers=("blocks",), **how):
    """After one step."""
    return gx.minimize(loss_fn, tx, layers=layers, **how)(params, tx.init(params), X)


def of_matrices(f):
    """``f`` on each stack of matrices, in front of momentum."""

    def update(updates, params=None):
        change = functools.partial(jax.tree.map, lambda u: f(u) if u.ndim > 2 else u)
        return updates | {"blocks": change(updates["blocks"])}

    return optax.chain(optax.stateless(update), optax.sgd(0.1, momentum=0.9))


def all_of(table):
    """Their mean, in one program."""
    return of_matrices(lambda x: sum(f(x) for f in table.values()) / len(table))


# Muon.


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"preconditioning": "spectral"},
        {"preconditioning": "aol"},
        {"ns_coeffs": ((3.4, -4.7, 2.0),) * 3},
    ],
    ids=str,
)
def test_muon(how):
    """Its sums have another order in a stack, and its polynomials amplify that."""
    tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbered, **how)
    check(model(), tx, rtol=2e-3)


@pytest.mark.slow
def test_muon_by_its_formula():
    """NumPy in float64, for the first step of each layer."""
    tx = optax.contrib.muon(
        0.02, adam_weight_decay=0.0, muon_weight_dimension_numbers=numbered
    )
    params = start()
    new, *_ = trained(tx, start())
    grads = jax.tree.map(np.float64, jax.grad(loss_fn)(params, X))
    for name, w in params["blocks"].items():
        stacks = grads["blocks"][name], w, new["blocks"][name]
        for g, old, now in zip(*stacks, strict=True) if w.ndim > 2 else ():
            tall = g if g.shape[0] <= g.shape[1] else g.T
            y = tall / (np.linalg.norm(tall) + 1e-8)
            for _ in range(5):
                a = y @ y.T
                y = 3.4445 * y + (-4.775 * a + 2.0315 * a @ a) @ y
            y = y if g.shape[0] <= g.shape[1] else y.T
            scale = max(1, g.shape[1] / g.shape[0]) ** 0.5
            np.testing.assert_allclose(old - now, 0.02 * scale * y, atol=1e-4)


# What keeps layers apart. tests/draw/ draws further programs.


def until(goes_on):
    """A loop that each layer leaves after its own number of steps."""
    return jax.vmap(
        lambda x: jax.lax.while_loop(
            lambda c: goes_on(*c), lambda c: (c[0] + 1, 1.3 * c[1] + 0.01), (0, x)
        )[1]
    )


@jax.checkpoint
def powers(x):
    """A scan over rows, with a carry that begins as zeros."""
    rows = jnp.swapaxes(x, 0, 1)
    last, y = jax.lax.scan(
        lambda c, row: (c + row, jnp.sin(c)), jnp.zeros_like(rows[0]), rows
    )
    return jnp.swapaxes(y, 0, 1) + last[:, None]


def square(x):
    """x xᵀ + 1, of the smaller size."""
    return x @ x.T + jnp.eye(len(x))


@jax.custom_vjp
def whitened(x):
    lower = jnp.linalg.cholesky(square(x))
    return jax.scipy.linalg.solve_triangular(lower, x, lower=True)


whitened.defvjp(lambda x: (whitened(x), None), lambda _, g: (g,))


def root(a):
    """The inverse fourth root, by eigenvalues, as in Shampoo."""
    values, q = jnp.linalg.eigh(a)
    return q * values**-0.25 @ q.T


ALONG = {
    "while_loop": until(lambda i, x: (i < 9) & (jnp.linalg.norm(x) < 2 + x[0, 0])),
    "scan": powers,
    "two that meet": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, c: (c[1], c[0] + x), (jnp.zeros_like(x), jnp.zeros_like(x))
    )[0],
    "map over layers": lambda x: jax.lax.map(lambda y: y @ y.T @ jnp.sort(y, 1), x),
    "cond in a loop": jax.vmap(
        lambda x: jax.lax.fori_loop(
            0, 3, lambda i, y: jax.lax.cond(i > 1, jnp.sin, lambda y: 2 * y, y), x
        )
    ),
    "eigh": jax.vmap(lambda x: root(square(x)) @ x @ root(square(x.T))),
    "qr": jax.vmap(lambda x: jnp.linalg.qr(square(x))[0] @ x),
    "cholesky": jax.vmap(whitened),
    "lu": jax.vmap(lambda x: jax.scipy.linalg.lu_factor(square(x))[0] @ x),
    "median": lambda x: x - jnp.median(x, axis=(1, 2), keepdims=True),
    "top_k": lambda x: jnp.where(x >= jax.lax.top_k(x, 2)[0][..., -1:], x, 0),
    "cumulative": lambda x: jnp.cumsum(x, 1) + jax.lax.cummax(x, 2),
    "other order": lambda x: jnp.flip(x, 1) + jnp.roll(x, 1, -1),
    "joined": lambda x: jnp.concatenate([x, jnp.zeros_like(x)], 1)[:, : x.shape[1]],
    "stacked": lambda x: jnp.stack([x, 2 * x], -1).max(-1) + jnp.stack([x, x])[1],
    "reads": jax.vmap(lambda x: x[:, jnp.argsort(x[0])] + x[jnp.argmax(x[:, 0])]),
    "writes": jax.vmap(lambda x: x.at[jnp.argmin(x[:, 0])].multiply(2).at[:, 0].set(1)),
    "diagonal": jax.vmap(lambda x: x.at[jnp.arange(6), jnp.arange(6)].add(1)),
    "fft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x)[..., :2], x.shape[-1]),
    "solve": lambda x: jnp.linalg.solve(x @ x.mT + 4 * jnp.eye(x.shape[1]), x),
    "own keys": lambda x: (
        x
        * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(
            jax.random.split(jax.random.key(0), len(x))
        )
    ),
    "a part": lambda x: jax.lax.dynamic_update_slice_in_dim(
        x, 2 * jax.lax.dynamic_slice_in_dim(x, jnp.argmax(jnp.arange(2)), 2, 1), 0, 1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, LAYERS, WIDTH])
def test_entries_of_each_layer(layers):
    """Also of as many layers as a matrix has rows. One program has them all."""
    check(model(layers), all_of(ALONG), steps=2, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", [jax.jacrev, jax.jacfwd])
def test_derivatives_of_functions_that_have_their_own(way):
    """Factors in a solve have none by the matrix."""
    line, solve = jnp.linspace(-1, 1, 5), ALONG["solve"]
    tx = of_matrices(lambda x: solve(x) + jnp.interp(x, line, jnp.sin(line)))

    def after(x, layers):
        p = start()
        step = gx.minimize(loss_fn, tx, layers=layers, donate=False)
        return jax.tree.map(jnp.sum, step(p, tx.init(p), x)[0]["blocks"])

    jacobian = jax.jit(way(after), static_argnums=1)
    got, wanted = jacobian(X, ("blocks",)), jacobian(X, ())
    chex.assert_trees_all_close(got, wanted, rtol=1e-3, atol=1e-5)


# What mixes layers.

MIXED = {
    "sort": lambda x: jnp.sort(x, 0),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "rev": lambda x: x[::-1],
    "dynamic_slice of a layer": lambda x: x + x[jnp.argmax(jnp.ones(3))],
    "scatter-mul": lambda x: jax.lax.fori_loop(
        0, len(x), lambda i, y: y.at[i].multiply(2.0), x
    ),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c), jnp.zeros(x.shape[1:]), x)[
        1
    ],
    "reduce_or": lambda x: jax.lax.while_loop(
        lambda y: jnp.any(jnp.linalg.norm(y, axis=(1, 2)) < 3), lambda y: 1.3 * y, x
    ),
    "reduce_sum in a loop": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, y: y - y.mean(0), x
    ),
    "dynamic_update_slice": lambda x: jax.lax.dynamic_update_slice_in_dim(
        x, jnp.ones((1, *x.shape[1:])), jnp.argmax(jnp.ones(3)), 0
    ),
    "concatenate": lambda x: jnp.concatenate([x, x]).reshape(2, *x.shape)[0],
    "scatter": lambda x: x.at[:2].set(jnp.zeros((2, *x.shape[1:]))),
    "reshape in Fortran's order": lambda x: x.ravel(order="F").reshape(x.shape),
    "reshape of other axes": lambda x: jax.lax.reshape(x, x.shape, (0, 2, 1)).reshape(
        2, -1, *x.shape[1:]
    )[0, 0],
    "pad": lambda x: jax.lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0), (0, 0, 0))),
    "pad between": lambda x: jax.lax.pad(x, 0.0, ((0, 0, 1), *[(0, 0, 0)] * 2))[:4],
    "slice": lambda x: x * x[:1],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    "fft of all axes": lambda x: jnp.abs(jnp.fft.fftn(x)),
    "conv_general_dilated": lambda x: jax.lax.conv(
        x[None], jnp.ones((len(x), len(x), 1, 1)), (1, 1), "SAME"
    )[0],
    "reduce_window_max": lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (2, 1, 1), (1, 1, 1), "SAME"
    ),
    "random_bits": lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
    # One key of them draws for all.
    "random_bits of XLA": lambda x: (
        x
        * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(
            jax.random.split(jax.random.key(0, impl="rbg"), len(x))
        )
    ),
    "device_put": lambda x: jax.device_put(x, jax.devices()[0]),
}


@pytest.mark.every
@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_layers_is_refused_by_name(name):
    tx = of_matrices(MIXED[name])
    step = gx.minimize(loss_fn, tx, layers=["blocks"])
    operation = name.partition(" ")[0]
    with pytest.raises(TypeError, match=rf"may mix layers, by '{operation}'"):
        step.trace(start(), tx.init(start()), X)


# The number of a layer.

HALVES = 0.5 ** np.arange(LAYERS, dtype=np.float32)
ON_DEVICE = jnp.asarray(HALVES)


def shaped(rates, x):
    return jnp.asarray(rates).reshape(-1, *[1] * (x.ndim - 1))


def by_number(x):
    """The first two layers rest, and others have a rate each."""
    number = jnp.arange(len(x)).reshape(-1, 1, 1)
    return jnp.where(number < 2, 0, x * jnp.linspace(1, 2, len(x)).reshape(-1, 1, 1))


RATES = {
    "NumPy": lambda x: x * shaped(HALVES, x),
    "NumPy for each entry": lambda x: x * np.cumsum(np.ones(x.shape, "float32"), 0),
    "jax.numpy": lambda x: x * jnp.sqrt(shaped(ON_DEVICE, x)),
    "arange": lambda x: x * shaped(0.5 ** jnp.arange(len(x)), x),
    "backwards": lambda x: x * shaped(jnp.arange(len(x))[::-1] + 1.0, x),
    "iota of two axes": lambda x: x * jax.lax.broadcasted_iota(x.dtype, x.shape, 0),
    "iota of bytes": lambda x: x * jnp.arange(len(x), dtype="uint8").reshape(-1, 1, 1),
    "frozen": by_number,
    "groups": lambda x: (
        x.reshape(-1, *x.shape[2:]) * jnp.arange(x.shape[0] * x.shape[1])[:, None]
    ).reshape(x.shape),
    "in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda i, y: y * shaped(jnp.arange(len(y)) + i, y), x
    ),
    "in a branch": lambda x: jax.lax.cond(
        jnp.argmax(jnp.ones(2)) == 0, lambda y: y * shaped(HALVES, y), jnp.cos, x
    ),
    "in a derivative": jax.grad(
        lambda x: jnp.sum(jax.nn.relu(x) * shaped(jnp.arange(len(x)) * 1.0, x))
    ),
    "mapped": lambda x: jax.lax.map(
        lambda each: each[0] * each[1], (x, jnp.arange(1.0, len(x) + 1))
    ),
}


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_layer_knows_its_number(layers):
    """Some have a number for each of four layers."""
    of_four = ("NumPy", "jax.numpy", "in a branch") if layers == 1 else ()
    check(model(layers), all_of({k: f for k, f in RATES.items() if k not in of_four}))


@pytest.mark.slow
def test_a_layer_knows_its_number_in_two_passes():
    tx = optax.chain(of_matrices(RATES["arange"]), optax.clip_by_global_norm(0.05))
    check(model(), Way(tx, two_passes=True))


def rates_in_state(make):
    """A link whose rates lie in its state, and do not change."""

    def update(updates, state, params=None):
        rated = jax.tree.map(lambda u: u * shaped(state[0], u), updates["blocks"])
        return updates | {"blocks": rated}, state

    return optax.GradientTransformation(lambda p: (make(p), jnp.zeros(3)), update)


@pytest.mark.slow
def test_rates_in_a_state():
    first = rates_in_state(lambda p: jnp.asarray(HALVES))
    second = rates_in_state(lambda p: 0.5 ** jnp.arange(len(p["blocks"]["w"])))
    check(model(), optax.chain(optax.adam(0.01), first, second))


def test_rates_whose_init_reads_one_parameter():
    """It takes no mark instead of the parameter, so nobody knows whose state it is."""
    tx = rates_in_state(lambda p: 0.5 ** jnp.arange(1.0 * p["blocks"]["w"].shape[0]))
    step = gx.minimize(loss_fn, tx, layers=["blocks"])
    with pytest.raises(TypeError, match=r"from its parameter, by jax\.tree\.map"):
        step.lower(start(), tx.init(start()), X)


def test_a_state_for_layers_that_changes():
    """Its rates belong to no parameter, so nobody knows that they have layers."""

    def update(updates, state, params=None):
        new = jax.tree.map(lambda u: u * shaped(state, u), updates["blocks"])
        total = state + jax.vmap(jnp.sum)(updates["blocks"]["w"])
        return updates | {"blocks": new}, total

    tx = optax.GradientTransformation(lambda p: jnp.ones(len(p["blocks"]["w"])), update)
    step = gx.minimize(loss_fn, tx, layers=["blocks"], donate=False)
    with pytest.raises(TypeError, match=r"\[4\], has no layer.*make it from the param"):
        step(start(), tx.init(start()), X)
    step = gx.minimize(loss_fn, tx, layers=["blocks"], two_passes=True)
    with pytest.raises(TypeError, match=r"has no layer for each layer"):
        step.lower(start(), tx.init(start()), X)


@pytest.mark.slow
def test_rounding_at_random_gives_the_bits_of_the_whole_stack():
    """The update is the same number for all entries, so only the bits differ."""
    same = optax.stateless_with_tree_map(lambda u, _: jnp.full_like(u, -1e-3))
    tx = optax.chain(same, gx.round_stochastically(seed=3))

    def make():
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), start())

    got, wanted = (trained(tx, make(), layers=x)[0] for x in (["blocks"], ()))
    chex.assert_trees_all_equal(got, wanted)
    rounded_down = jax.tree.map(lambda x, y: jnp.mean(x != y), got, make())
    assert 0.02 < min(jax.tree.leaves(rounded_down)) < 1


# Devices.

ADAM = optax.adam(0.01)


def after(over):
    return optax.chain(optax.stateless(lambda u, _: over(u)), ADAM)


MEAN = optax.stateless(lambda u, _: jax.lax.pmean(u, "i"))
# They add up gradients over named axes, of all leaves at once.
OVER_DEVICES = {
    "pmean": after(lambda u: jax.lax.pmean(u, "i")),
    "pmax": after(lambda u: jax.lax.pmax(u, "i")),
    "ppermute": after(lambda u: jax.lax.ppermute(u, "i", [(0, 1), (1, 0)])),
    "clip": optax.chain(MEAN, gx.clip_by_global_norm(0.05), ADAM),
    # Its mean over devices is in the step that makes it.
    "accumulate": gx.accumulate(ADAM, 2, axis_name="i"),
}


def on_two(tx, layers, over, steps=1, **how):
    """Steps on two batches, one for each entry of the axis ``i``."""
    step = gx.minimize(loss_fn, tx, layers=layers, donate=False, **how)

    def run(p, x):
        state = tx.init(p)
        for k in range(steps):
            p, state, _ = step(p, state, x + k)
        return p

    return over(run)(start(), jnp.stack([X, jnp.cos(X)]))


def shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])

    def over(run):
        def one(p, x):
            if check_vma:
                p = jax.lax.pcast(p, "i", to="varying")
            return jax.tree.map(lambda x: x[None], run(p, x[0]))

        specs = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P("i")}
        return jax.jit(jax.shard_map(one, **specs, check_vma=check_vma))

    return over


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check_vma"),
    [
        ("pmean", True),
        ("pmax", False),
        ("ppermute", True),
        ("clip", True),
        ("accumulate", False),
    ],
)
def test_a_mean_over_devices_mixes_no_layers(name, check_vma):
    how = {"two_passes": True} if name == "clip" else {}
    over, tx = shard_map(check_vma), OVER_DEVICES[name]
    got = on_two(tx, ["blocks"], over, steps=4, **how)
    wanted = on_two(tx, (), over, steps=4)
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("over", [jax.pmap, jax.vmap])
def test_a_mean_in_pmap_or_vmap(over):
    """An axis of a vmap has no name inside of it: a sum is one over an axis."""
    over = functools.partial(over, axis_name="i", in_axes=(None, 0))
    got, wanted = (on_two(OVER_DEVICES["pmean"], x, over) for x in (["blocks"], ()))
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=5e-6)


def test_a_sum_over_layers_by_the_name_of_a_vmap():
    """The layers are the named axis, so they are mixed."""
    add = jax.vmap(lambda u: jax.lax.psum(u, "layers") - u, axis_name="layers")
    step = gx.minimize(loss_fn, of_matrices(add), layers=["blocks"])
    with pytest.raises(TypeError, match=r"may mix layers, by '(psum|reduce_sum)"):
        step.lower(start(), of_matrices(add).init(start()), X)


# Errors.


def longer(x):
    return jnp.concatenate([x, x[:1]])


@pytest.mark.every
@pytest.mark.parametrize("name", ["blocks", "head"])
@pytest.mark.parametrize(
    ("tx", "layers", "message"),
    [
        (gx.ftrl(0.1), ["blocks"], "state is not that of tx: at .*{}.* has"),
        (gx.adagrad(0.1), (), "state is not that of tx: at .*{}.* has"),
        (optax.adam(0.1), ["blocks"], "state is not that of tx: at .*{}.* has"),
    ],
)
def test_a_state_for_another_size(tx, layers, message, name):
    """Of a stack, or of a leaf that is no stack; the state is not blamed on layers."""
    grown = start() | {name: jax.tree.map(longer, start()[name])}
    step = gx.minimize(loss_fn, tx, layers=layers)
    with pytest.raises(TypeError, match=message.format(f"'{name}'")):
        step(start(), tx.init(grown), X)


@pytest.mark.parametrize("links", ["centralize, polyak_sgd", "clip, clip"])
def test_a_third_pass_is_named(links):
    """Two stacks of two scans, with layers along the second axis."""
    tx = {
        "clip, clip": optax.chain(
            gx.clip_by_global_norm(0.1), gx.clip_by_global_norm(1.0)
        ),
        "centralize, polyak_sgd": optax.chain(optax.centralize(), optax.polyak_sgd()),
    }[links]

    def loss_fn(p, x):
        for name in "ab":
            w = jnp.moveaxis(p[name], 1, 0)
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)
        return jnp.mean(x**2)

    params = dict.fromkeys("ab", jnp.ones((WIDTH, LAYERS, WIDTH)))
    step = gx.minimize(loss_fn, tx, layers=["a", "b"], two_passes=True)
    with pytest.raises(TypeError, match="needs a third pass, as 'reduce_sum'"):
        step.lower(params, tx.init(params), X)


@pytest.mark.slow
def test_no_tracer_leaks():
    loop = optax.chain(
        *(of_matrices(RATES[f"in a {x}"]) for x in ("loop", "derivative"))
    )
    for tx in (gx.skip_spikes(loop), optax.apply_if_finite(optax.sgd(0.1), 2)):
        with jax.check_tracer_leaks():
            trained(tx, start(), two_passes=True)


# State without layers.


def adafactor(least, **how):
    how = {"multiply_by_parameter_scale": False, "clipping_threshold": None} | how
    return optax.adafactor(0.1, min_dim_size_to_factor=least, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "layers", "stacks"),
    [
        (5, 1, ["blocks"]),
        (6, 4, ["blocks"]),
        (7, 4, ["blocks"]),
        (11, 3, ["blocks"]),
        # With one more layer it would factor over layers, and have another state.
        (WIDTH, WIDTH, ["blocks/w"]),
    ],
)
def test_adafactor(least, layers, stacks):
    """Its placeholders have shape [1]; 6 columns are factored, or they are not."""
    check(model(layers, stacks), adafactor(least))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [5, 12])
def test_adafactor_of_vectors_that_it_factors_over_layers(layers):
    """They mix layers, which two passes can do: the layers are an axis of a factor."""
    with pytest.raises(TypeError, match=r"v_(row|col)\['blocks'\]\['b'\] .*two_passes"):
        trained(adafactor(5, momentum=0.9), start(layers))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx", [adafactor(6, clipping_threshold=0.01), gx.novograd(0.1)]
)
def test_state_that_changes_by_a_sum_over_layers_in_two_passes(tx):
    """The state of novograd has no layers."""
    check(model(), Way(tx, two_passes=True))


def low(tx, **given):
    return gx.low_bit_state(tx, min_size=1, block_size=8, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "advice", "advised"),
    [
        (
            gx.novograd(0.1),
            "novograd stacked_axes=1",
            gx.novograd(0.1, stacked_axes=STACKED),
        ),
        (
            low(gx.novograd(0.1), block_axis=-1),
            "novograd stacked_axes=1",
            low(gx.novograd(0.1, stacked_axes=STACKED), block_axis=-1),
        ),
        (
            optax.chain(gx.low_bit_state(gx.measure_norms()), optax.sgd(0.1)),
            "measure_norms stacked_axes=1",
            optax.chain(
                gx.low_bit_state(gx.measure_norms(stacked_axes=STACKED)), optax.sgd(0.1)
            ),
        ),
        (low(optax.adam(0.1)), "low_bit_state block_axis=-1, or name it in keep", None),
        (
            low(optax.adam(0.1)),
            "low_bit_state block_axis=-1, or name it in keep",
            low(optax.adam(0.1), keep=lambda path: path.endswith("/b")),
        ),
        (
            optax.adafactor(0.1, min_dim_size_to_factor=4, clipping_threshold=None),
            None,
            None,
        ),
    ],
    ids=["nu", "nu in 8 bits", "norms", "scales", "scales kept", "of another library"],
)
def test_the_advice_for_state_without_layers_is_that_of_its_field(tx, advice, advised):
    """Whoever is around. With what is advised the step runs."""
    given = f": give {advice}" if advice else ""
    with pytest.raises(TypeError, match=f"layer for each layer of the stack{given}[.]"):
        trained(tx, start(32))
    if advised:
        trained(advised, start(32))
