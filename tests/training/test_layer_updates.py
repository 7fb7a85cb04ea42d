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
from benchmarks.compilers import placed
from benchmarks.grid import devices
from benchmarks.models import next_tokens, size, transformer

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


def train(tx, params, *, steps=3, extra=lambda k, state: {}, **how):
    step = gx.minimize(loss_fn, tx, **how)
    state, losses = tx.init(params), []
    for k in range(steps):
        params, state, loss = step(params, state, X, **extra(k, state))
        losses.append(loss)
    return params, state, losses


def check(tx, make=start, rtol=2e-5, *, layers=("blocks",), two_passes=False, **how):
    """The steps by the layer and the ordinary ones: numbers, types and state."""
    wanted = train(tx, make(), **how)
    got = train(tx, make(), layers=layers, two_passes=two_passes, **how)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=rtol / 4)


def of_matrices(f):
    """``f`` on each stack of matrices, in front of momentum."""

    def update(updates, params=None):
        change = functools.partial(jax.tree.map, lambda u: f(u) if u.ndim > 2 else u)
        return updates | {"blocks": change(updates["blocks"])}

    return optax.chain(optax.stateless(update), optax.sgd(0.1, momentum=0.9))


# Loops.


def numbered(params):
    """The axes of each matrix of a layer, for Muon."""
    axes = optax.contrib.MuonDimensionNumbers
    blocks = {"w": axes(1, 2), "v": axes(-2, -1), "b": None}
    return {"blocks": blocks, "head": None}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"preconditioning": "spectral"},
        {"preconditioning": "aol"},
        {"ns_coeffs": ((3.4, -4.7, 2.0),) * 3},
    ],
    ids=str,
)
def test_muon(how):
    """Its sums have another order in a stack, and its polynomials amplify that."""
    tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbered, **how)
    check(tx, rtol=2e-3)


@pytest.mark.slow
def test_muon_by_its_formula():
    """NumPy in float64, for the first step of each layer."""
    tx = optax.contrib.muon(
        0.02, adam_weight_decay=0.0, muon_weight_dimension_numbers=numbered
    )
    params = start()
    new, *_ = train(tx, start(), steps=1, layers=["blocks"])
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


def until(goes_on):
    """A loop that each layer leaves after its own number of steps."""
    return jax.vmap(
        lambda x: jax.lax.while_loop(
            lambda c: goes_on(*c), lambda c: (c[0] + 1, 1.3 * c[1] + 0.01), (0, x)
        )[1]
    )


def powers(x):
    """A scan over rows, with a carry that begins as zeros."""
    rows = jnp.swapaxes(x, 0, 1)
    last, y = jax.lax.scan(
        lambda c, row: (c + row, jnp.sin(c)), jnp.zeros_like(rows[0]), rows
    )
    return jnp.swapaxes(y, 0, 1) + last[:, None]


LOOPS = {
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * i + y, x),
    "from zeros": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, y: 0.5 * y + x, jnp.zeros_like(x)
    ),
    "unrolled": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, y: jnp.sin(y) + x, x, unroll=True
    ),
    "bounds of data": jax.vmap(
        lambda x: jax.lax.fori_loop(
            0, jnp.argmax(jnp.arange(4)), lambda _, y: 1.1 * y, x
        )
    ),
    "while_loop": until(lambda i, x: jnp.linalg.norm(x) < 3),
    "at most": until(lambda i, x: (i < 9) & (jnp.linalg.norm(x) < 2 + x[0, 0])),
    "scan": powers,
    "backwards": jax.vmap(
        lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0] * 0, x, reverse=True)[
            1
        ]
    ),
    "two that meet": lambda x: jax.lax.fori_loop(
        0, 3, lambda _, c: (c[1], c[0] + x), (jnp.zeros_like(x), jnp.zeros_like(x))
    )[0],
    "map over layers": lambda x: jax.lax.map(lambda y: y @ y.T @ jnp.sort(y, 1), x),
    "a loop in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda i, y: y + jax.lax.map(jnp.sin, y) + LOOPS["while_loop"](y) * i, x
    ),
    "cond": jax.vmap(
        lambda x: jax.lax.fori_loop(
            0, 3, lambda i, y: jax.lax.cond(i > 1, jnp.sin, lambda y: 2 * y, y), x
        )
    ),
    "checkpoint": jax.checkpoint(powers),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_within_a_layer(name):
    check(of_matrices(LOOPS[name]))


@pytest.mark.parametrize("name", ["while_loop", "scan", "map over layers"])
def test_a_loop_within_one_layer_or_many(name):
    for layers in 1, 6, 10:  # As many as a matrix has rows.
        check(of_matrices(LOOPS[name]), functools.partial(start, layers))


# Factorizations.


def square(x):
    """x xᵀ + 1, of the smaller size."""
    return x @ x.T + jnp.eye(len(x))


def shampoo(x):
    """With both inverse fourth roots, by eigenvalues."""

    def root(a):
        values, q = jnp.linalg.eigh(a)
        return q * values**-0.25 @ q.T

    return root(square(x)) @ x @ root(square(x.T))


def polar(x):
    u, _, v = jnp.linalg.svd(x, full_matrices=False)
    return u @ v


@jax.custom_vjp
def whitened(x):
    lower = jnp.linalg.cholesky(square(x))
    return jax.scipy.linalg.solve_triangular(lower, x, lower=True)


whitened.defvjp(lambda x: (whitened(x), None), lambda _, g: (g,))

FACTORS = {
    "eigh": shampoo,
    "svd": polar,
    "qr": lambda x: jnp.linalg.qr(square(x))[0] @ x,
    "cholesky": whitened,
    "lu": lambda x: jax.scipy.linalg.lu_factor(square(x))[0] @ x,
    "inverse root by Newton": lambda x: (
        jax.lax.while_loop(
            lambda c: jnp.max(jnp.abs(c[1] - jnp.eye(len(x)))) > 1e-3,
            lambda c: (
                0.5 * c[0] @ (3 * jnp.eye(len(x)) - c[1]),
                0.25 * c[1] @ jnp.linalg.matrix_power(3 * jnp.eye(len(x)) - c[1], 2),
            ),
            (jnp.eye(len(x)), square(x) / jnp.linalg.norm(square(x))),
        )[0]
        @ x
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factorization_of_each_layer(name):
    check(of_matrices(jax.vmap(FACTORS[name])), rtol=1e-4 if name == "eigh" else 2e-5)


def soap():
    """Adam in the eigenbasis of a mean of g gᵀ, refreshed by power iteration and QR.

    As SOAP (2409.11321) with one side: the basis is sorted by its estimated
    eigenvalues, and the second moment with it.
    """

    def init(params):
        def eye(p):
            return jnp.broadcast_to(jnp.eye(p.shape[1]), (len(p), *2 * p.shape[1:2]))

        names = {"m": jnp.zeros_like, "v": jnp.zeros_like, "gg": eye, "q": eye}
        return {name: jax.tree.map(f, params) for name, f in names.items()}

    def one(g, m, v, gg, q):
        gg = 0.9 * gg + 0.1 * g @ g.T
        order = jnp.argsort(-jnp.diag(q.T @ gg @ q))
        v, q = v[order], q[:, order]
        q, _ = jnp.linalg.qr((gg + 1e-2 * jnp.eye(len(g))) @ q)
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * (q.T @ g) ** 2
        return -0.01 * q @ (q.T @ m / jnp.sqrt(v + 1e-4)), m, v, gg, q

    def update(updates, state, params=None):
        names = "m", "v", "gg", "q"
        trees = updates, *(state[name] for name in names)
        results = jax.tree.map(lambda *x: [*jax.vmap(one)(*x)], *trees)
        u, *new = jax.tree.transpose(
            jax.tree.structure(updates), jax.tree.structure([0] * 5), results
        )
        return u, dict(zip(names, new, strict=True))

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
def test_soap():
    def labels(params):
        return jax.tree.map(lambda p: "soap" if p.ndim > 2 else "sgd", params)

    tx = optax.partition({"soap": soap(), "sgd": optax.sgd(0.1)}, labels)
    check(tx, rtol=2e-4, steps=5)


# Sorts, and entries along other axes.

ALONG = {
    "sort": lambda x: x * jnp.sort(x, -1) + jnp.argsort(x, 1),
    "median": lambda x: x - jnp.median(x, axis=(1, 2), keepdims=True),
    "top_k": lambda x: jnp.where(x >= jax.lax.top_k(x, 2)[0][..., -1:], x, 0),
    "cumulative": lambda x: jnp.cumsum(x, 1) + jax.lax.cummax(x, 2),
    "other order": lambda x: jnp.flip(x, 1) + jnp.roll(x, 1, -1),
    "joined": lambda x: jnp.concatenate([x, jnp.zeros_like(x)], 1)[:, : x.shape[1]],
    "stacked": lambda x: jnp.stack([x, 2 * x], -1).max(-1) + jnp.stack([x, x])[1],
    "split": lambda x: x + jnp.split(x, 2, 2)[1].sum(2, keepdims=True),
    "argmax": lambda x: x * (jnp.arange(x.shape[-1]) == jnp.argmax(x, -1)[..., None]),
    "reads": jax.vmap(lambda x: x[:, jnp.argsort(x[0])] + x[jnp.argmax(x[:, 0])]),
    "the same reads": lambda x: (
        x + jnp.take(x, jnp.array([0, 1, 1]), 2).sum(2)[..., None]
    ),
    "writes": jax.vmap(lambda x: x.at[jnp.argmin(x[:, 0])].multiply(2).at[:, 0].set(1)),
    "diagonal": jax.vmap(lambda x: x.at[jnp.arange(6), jnp.arange(6)].add(1)),
    "fft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x)[..., :2], x.shape[-1]),
    "fft of two axes": lambda x: jnp.real(jnp.fft.ifft2(jnp.abs(jnp.fft.fft2(x)))),
    "fft of another axis": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)),
    "a part": lambda x: jax.lax.dynamic_update_slice_in_dim(
        x, 2 * jax.lax.dynamic_slice_in_dim(x, jnp.argmax(jnp.arange(2)), 2, 1), 0, 1
    ),
}


@pytest.mark.slow
def test_entries_of_each_layer():
    """One program has them all."""
    check(of_matrices(lambda x: sum(f(x) for f in ALONG.values())))


# What mixes layers.

MIXED = {
    "sort": lambda x: jnp.sort(x, 0),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "rev": lambda x: x[::-1],
    "argmax": lambda x: x * jnp.argmax(x, 0),
    "gather": lambda x: x[jnp.array([1, 0, 3, 2])],
    "dynamic_slice of a layer": lambda x: x + x[jnp.argmax(jnp.ones(3))],
    "scatter-mul": lambda x: jax.lax.fori_loop(
        0, len(x), lambda i, y: y.at[i].multiply(2.0), x
    ),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c), jnp.zeros(x.shape[1:]), x)[
        1
    ],
    "scan that turns": lambda x: jax.lax.fori_loop(
        0, 2, lambda _, y: jnp.swapaxes(y, 0, 1), x[:, :4, :4]
    ).sum((1, 2), keepdims=True),
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
    "qr": lambda x: jnp.moveaxis(jnp.linalg.qr(jnp.moveaxis(x, 0, 2))[0], 2, 0),
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
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_layers_is_refused_by_name(name):
    tx = of_matrices(MIXED[name])
    step = gx.minimize(loss_fn, tx, layers=["blocks"])
    operation = name.partition(" ")[0]
    with pytest.raises(TypeError, match=rf"may mix layers, by '{operation}'"):
        step.lower(start(), tx.init(start()), X)


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


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_layer_knows_its_number(name, layers):
    if layers == 1 and name in ("NumPy", "jax.numpy", "in a branch"):
        pytest.skip("It has a number for each of four layers.")
    check(of_matrices(RATES[name]), functools.partial(start, layers))


def test_a_layer_knows_its_number_in_two_passes():
    tx = optax.chain(of_matrices(RATES["arange"]), optax.clip_by_global_norm(0.05))
    check(tx, two_passes=True)


def rates_in_state(make):
    """A link whose rates lie in its state, and do not change."""

    def update(updates, state, params=None):
        rated = jax.tree.map(lambda u: u * shaped(state[0], u), updates["blocks"])
        return updates | {"blocks": rated}, state

    return optax.GradientTransformation(lambda p: (make(p), jnp.zeros(3)), update)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: jnp.asarray(HALVES),
        lambda p: 0.5 ** jnp.arange(len(p["blocks"]["w"])),
    ],
)
def test_rates_in_a_state(make):
    check(optax.chain(optax.adam(0.01), rates_in_state(make)))


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


@pytest.mark.parametrize("layers", [["blocks"], ["blocks/w"]])
def test_rounding_at_random_gives_the_bits_of_the_whole_stack(layers):
    """The update is the same number for all entries, so only the bits differ."""
    same = optax.stateless_with_tree_map(lambda u, _: jnp.full_like(u, -1e-3))
    tx = optax.chain(same, gx.round_stochastically(seed=3))

    def make():
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), start())

    got, wanted = (train(tx, make(), layers=x)[0] for x in (layers, ()))
    chex.assert_trees_all_equal(got, wanted)
    rounded_down = jax.tree.map(lambda x, y: jnp.mean(x != y), got, make())
    assert 0.02 < min(jax.tree.leaves(rounded_down)) < 1


# Devices.


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", ["pmean", "pmax", "ppermute", "clip"])
def test_a_mean_over_devices_mixes_no_layers(name, check_vma):
    """A link adds up gradients over named axes, of all leaves at once."""
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    over = {
        "pmax": lambda u: jax.lax.pmax(u, "i"),
        "ppermute": lambda u: jax.lax.ppermute(u, "i", [(0, 1), (1, 0)]),
    }.get(name, lambda u: jax.lax.pmean(u, "i"))
    link = optax.stateless(lambda u, _: over(u))
    last = optax.chain(gx.clip_by_global_norm(0.05), optax.adam(0.01))
    tx = optax.chain(link, last if name == "clip" else optax.adam(0.01))

    def trained(layers):
        two = name == "clip" and bool(layers)
        step = gx.minimize(loss_fn, tx, layers=layers, two_passes=two, donate=False)

        def run(p, x):
            if check_vma:
                p = jax.lax.pcast(p, "i", to="varying")
            state = tx.init(p)
            for _ in range(2):
                p, state, _ = step(p, state, x[0])
            return jax.tree.map(lambda x: x[None], p)

        specs = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P("i")}
        run = jax.shard_map(run, **specs, check_vma=check_vma)
        return jax.jit(run)(start(), jnp.stack([X, jnp.cos(X)]))

    got, wanted = trained(["blocks"]), trained([])
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=5e-6)


def test_sums_of_micro_batches_over_devices():
    """`accumulate` takes its mean over devices once, in the step that makes it."""
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    tx = gx.accumulate(optax.adam(0.01), 2, axis_name="i")

    def trained(layers):
        step = gx.minimize(loss_fn, tx, layers=layers, donate=False)

        def run(p, x):
            state = tx.init(p)
            for k in range(4):
                p, state, _ = step(p, state, x[0] + k)
            return p

        specs = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P()}
        run = jax.shard_map(run, **specs, check_vma=False)
        return jax.jit(run)(start(), jnp.stack([X, jnp.cos(X)]))

    got, wanted = trained(["blocks"]), trained([])
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=5e-6)


def test_a_mean_in_pmap():
    link = optax.stateless(lambda u, _: jax.lax.pmean(u, "i"))
    tx = optax.chain(link, optax.adam(0.01))

    def trained(layers):
        step = gx.minimize(loss_fn, tx, layers=layers, donate=False)
        run = jax.pmap(lambda p, x: step(p, tx.init(p), x)[0], "i", in_axes=(None, 0))
        return run(start(), jnp.stack([X, jnp.cos(X)]))

    chex.assert_trees_all_close(trained(["blocks"]), trained([]), rtol=2e-5, atol=5e-6)


def test_an_axis_of_a_vmap_has_no_name_inside_of_it():
    """There a sum over it is one over an axis of arrays."""
    link = optax.stateless(lambda u, _: jax.lax.psum(u, "i"))
    tx = optax.chain(link, optax.sgd(0.1))

    def trained(layers):
        step = gx.minimize(loss_fn, tx, layers=layers, donate=False)
        run = jax.vmap(
            lambda p, x: step(p, tx.init(p), x)[0],
            in_axes=(None, 0),
            axis_name="i",
        )
        return run(start(), jnp.stack([X, jnp.cos(X)]))

    chex.assert_trees_all_close(trained(["blocks"]), trained([]), rtol=2e-5, atol=5e-6)


def test_a_sum_over_layers_by_the_name_of_a_vmap():
    """The layers are the named axis, so they are mixed."""
    add = jax.vmap(lambda u: jax.lax.psum(u, "layers") - u, axis_name="layers")
    step = gx.minimize(loss_fn, of_matrices(add), layers=["blocks"])
    with pytest.raises(TypeError, match=r"may mix layers, by '(psum|reduce_sum)"):
        step.lower(start(), of_matrices(add).init(start()), X)


# Errors.


@pytest.mark.parametrize("name", ["blocks", "head"])
@pytest.mark.parametrize(
    "tx", [gx.ftrl(0.1), gx.proximal_adagrad(0.1), gx.adagrad(0.1)]
)
def test_a_state_for_another_size(tx, name):
    """Of a stack, or of a leaf that is no stack; the state is not blamed on layers."""

    def longer(x):
        return jnp.concatenate([x, x[:1]])

    old = start()
    grown = old | {name: jax.tree.map(longer, old[name])}
    for other, how, message in [
        (tx, {"layers": ["blocks"]}, "state is not that of tx: at .*{}.* has"),
        (tx, {}, r"updates and .* differ at \[{}\]"),
        (
            optax.adam(0.1),
            {"layers": ["blocks"]},
            "state is not that of tx: at .*{}.* has",
        ),
    ]:
        step = gx.minimize(loss_fn, other, donate=False, **how)
        with pytest.raises(TypeError, match=message.format(f"'{name}'")):
            step(old, other.init(grown), X)


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


@pytest.mark.parametrize(
    "tx",
    [
        gx.accumulate(optax.sgd(0.1), 2),
        gx.skip_spikes(optax.sgd(0.1)),
        optax.chain(gx.clip_by_global_norm(1.0), optax.sgd(0.1)),
        of_matrices(RATES["in a loop"]),
        of_matrices(RATES["in a derivative"]),
        optax.apply_if_finite(optax.sgd(0.1), 2),
    ],
)
def test_no_tracer_leaks(tx):
    step = gx.minimize(loss_fn, tx, layers=["blocks"], two_passes=True, donate=False)
    with jax.check_tracer_leaks():
        step(start(), tx.init(start()), X)


# State without layers.


def adafactor(least, **how):
    how = {"multiply_by_parameter_scale": False, "clipping_threshold": None} | how
    return optax.adafactor(0.1, min_dim_size_to_factor=least, **how)


@pytest.mark.parametrize("layers", [1, 3, 4])
@pytest.mark.parametrize("least", [5, 6, 7, 11])
def test_adafactor(least, layers):
    """Its placeholders have shape [1]; 6 columns are factored, or they are not."""
    check(adafactor(least), functools.partial(start, layers))


def test_adafactor_of_as_many_layers_as_rows():
    """With one more layer it would factor over layers, too, and have another state."""
    check(adafactor(WIDTH), functools.partial(start, WIDTH), layers=["blocks/w"])


@pytest.mark.parametrize("layers", [5, 7, 12])
def test_adafactor_of_vectors_that_it_factors_over_layers(layers):
    """They mix layers, which two passes can do: the layers are an axis of a factor."""
    make = functools.partial(start, layers)
    tx = adafactor(5, momentum=0.9)
    with pytest.raises(TypeError, match=r"v_(row|col)\['blocks'\]\['b'\] .*two_passes"):
        train(tx, make(), layers=["blocks"])


def test_adafactor_with_a_clip_in_two_passes():
    check(adafactor(6, clipping_threshold=0.01), two_passes=True)


def test_a_number_for_each_stack_in_two_passes():
    """Its state has no layers, and changes by a sum over them."""
    with pytest.raises(TypeError, match=r"nu\['blocks'\]\['b'\] .* no layer for each"):
        train(gx.novograd(0.1), start(), layers=["blocks"])
    check(gx.novograd(0.1), two_passes=True)


def low(tx, **given):
    return gx.low_bit_state(tx, min_size=1, block_size=8, **given)


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
    make = functools.partial(start, 32)
    given = f": give {advice}" if advice else ""
    with pytest.raises(TypeError, match=f"layer for each layer of the stack{given}[.]"):
        train(tx, make(), layers=["blocks"])
    if advised:
        train(advised, make(), layers=["blocks"])


# Gates and late gradients.


def worker(k, state):
    return {"worker": [0, 1, 1, 0, 0, 1][k], "local_step": state.global_step}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "extra"),
    [
        (gx.delayed(optax.adam(0.1), 2), None),
        (gx.delayed(optax.adam(0.1), {"blocks": 1, "head": 0}), None),
        (gx.contrib.delayed_nesterov(0.1, num_delay=2), None),
        *(
            (gx.worker_mean(optax.adam(0.1), 2, method=method), worker)
            for method in ("all", "latest", "ringleader")
        ),
    ],
)
def test_late_gradients(tx, extra):
    check(tx, steps=6, extra=extra or (lambda k, state: {}))


# Memory.


def compiled(tx, **how):
    params = placed(transformer(layers=16, width=256, vocabulary=256), devices("cpu"))
    state = placed(jax.eval_shape(tx.init, params), devices("cpu"))
    tokens = placed(jax.ShapeDtypeStruct((1, 16), jnp.int32), devices("cpu"))
    step = gx.minimize(next_tokens, tx, **how)
    program = step.lower(params, state, tokens).compile()
    return program.memory_analysis().temp_size_in_bytes / size(params)


def muon_of_transformer():
    axes = optax.contrib.MuonDimensionNumbers
    matrices = dict.fromkeys(["down", "projection", "up"], axes(1, 2))
    layers = matrices | {"attention": axes(1, (2, 3, 4)), "norm1": None, "norm2": None}
    numbers = {"embed": None, "layers": layers, "norm": None}
    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers)


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize(
    ("tx", "bound"),
    [(muon_of_transformer(), 0.55), (adafactor(128), 0.2)],
    ids=["muon", "adafactor"],
)
def test_no_gradients_of_all_layers_are_kept(tx, bound):
    """Of the ordinary step 3.0 N and 2.0 N; Muon's products are those of a layer."""
    assert compiled(tx) > 1.9
    assert compiled(tx, layers=["layers"]) < bound
