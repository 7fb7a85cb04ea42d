"""Each formula and each option against float64 NumPy, over several steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradxform as gx
from tests import in_numpy, oracles
from tests.descriptors import KEPT, factory

SHAPES = {"k": (2, 3, 2), "b": (3,), "s": (), "frozen": (2, 2)}


def sequence(seed, steps=6, scales=(1.0,), zeros=0):
    rng = np.random.default_rng(seed)
    for t in range(steps):
        scale = 0.0 if t < zeros else scales[t % len(scales)]
        grads = {k: scale * rng.standard_normal(s) for k, s in SHAPES.items()}
        grads["frozen"] *= 0  # its gradient is zero for good
        yield {k: np.float64(np.float32(g)) for k, g in grads.items()}


def initial_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        k: np.float64(np.float32(rng.standard_normal(s))) for k, s in SHAPES.items()
    }


SEQUENCES = {
    "scales": {"scales": (1e-3, 1.0, 1e3)},
    "zero_start": {"zeros": 2},
}

RATES = 0.1 * 0.7 ** np.arange(6, dtype=np.float32)


def schedule(count):
    return jnp.asarray(RATES)[count]


def describe(options):
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items())


def agree(got, expected, rtol=2e-5):
    for k, value in expected.items():
        atol = rtol * max(np.abs(value).max(initial=0), 1e-3) / 10
        np.testing.assert_allclose(got[k], value, rtol=rtol, atol=atol, err_msg=k)


def fields(name, state):
    """What the oracle has there, too; delayed_nesterov's sum is another one."""
    names = [*KEPT[name]][:1] if name == "delayed_nesterov" else KEPT[name]
    return [optax.tree.get(state, field) for field in names]


# Beside the rows of descriptors.py, whose formulas test_contract.py compares.
ADAGRAD = [
    {},
    {"initial_accumulator_value": 0.0},
    {"initial_accumulator_value": 0.0, "eps": 0.0},
    {"initial_accumulator_value": 0.0, "eps": 0.0, "eps_in_sqrt": False},
    {"eps": 0.3},
    {"row_wise": True, "eps": 0.3, "eps_in_sqrt": False},
    {"row_wise": True, "clipnorm": 1.0},
    {"row_wise": True, "clipvalue": 0.2},
    {"row_wise": True, "global_clipnorm": 1.0},
]
NOVOGRAD = [
    {"learning_rate": schedule, "lr_in_momentum": True, "nesterov": True},
    {"b1": 0.5, "b2": 0.3},
    {"b1": 0.0, "b2": 0.0},
    {"eps": 0.3},
    {"eps": 0.0},
    {"eps": 0.0, "eps_in_sqrt": False},
    {"weight_decay": 0.1, "mask": {k: k in ("k", "s") for k in SHAPES}},
    {"grad_averaging": True, "weight_decay": 0.1, "nesterov": True},
    {"global_clipnorm": 1.0, "weight_decay": 0.1, "nesterov": True},
]
# With the smallest and the largest activation that is allowed, and one between them.
DELAYED = [
    {"num_delay": n, "b1": b1, "activation": np.float32(part / n)}
    for n, b1, part in (
        (1, 0.9, 0),
        (1, 0.0, 1),
        (2, 0.9, 1),
        (3, 0.3, 0.7),
        (4, 0.99, 1),
    )
]
DELAYED += [DELAYED[3] | {"learning_rate": schedule}]
RULES = [
    (name, options)
    for name, rows in (
        ("adagrad", ADAGRAD),
        ("novograd", NOVOGRAD),
        ("delayed_nesterov", DELAYED),
    )
    for options in rows
]


@pytest.mark.slow  # The next test has the options, in one program.
@pytest.mark.parametrize(
    ("name", "options"), RULES, ids=[f"{n}-{describe(o)}" for n, o in RULES]
)
def test_parameters_and_state_are_those_of_the_formula(name, options):
    options = {"learning_rate": 0.1} | options
    tx = factory(name)(**options)
    step = in_numpy.jit(functools.partial(gx.apply_gradients, tx))
    for of in SEQUENCES.values():
        params = jax.tree.map(np.float32, initial_params())
        state, grads = tx.init(params), list(sequence(1, **of))
        formula = getattr(oracles, name)
        expected = formula(initial_params(), iter(grads), **options)
        for t, (g, wanted) in enumerate(zip(grads, expected, strict=True), 1):
            params, state = step(jax.tree.map(np.float32, g), state, params)
            agree(params, wanted[0])
            for got, kept in zip(fields(name, state), wanted[1:], strict=False):
                agree(got, kept)
            if name == "delayed_nesterov":
                counts = {*map(int, state[0].count.values())}
                assert counts == {t % options["num_delay"]}


# Each option of these at least once, in one program.
TOGETHER = {
    "novograd in the momentum": (
        "novograd",
        {"learning_rate": schedule, "lr_in_momentum": True, "nesterov": True}
        | {"b1": 0.5, "b2": 0.3, "eps": 0.3, "eps_in_sqrt": False},
    ),
    "novograd decays": (
        "novograd",
        {"weight_decay": 0.1, "grad_averaging": True, "global_clipnorm": 1.0}
        | {"mask": {"k": True, "s": False, "frozen": True}},
    ),
    "novograd clips": ("novograd", {"clipnorm": 0.5, "weight_decay": 0.2, "eps": 0.0}),
    "adagrad": ("adagrad", {"eps": 0.3, "clipvalue": 0.2, "learning_rate": schedule}),
    "adagrad by rows": (
        "adagrad",
        {"row_wise": True, "eps": 0.3, "eps_in_sqrt": False},
    ),
    "adagrad by clipped rows": (
        "adagrad",
        {"row_wise": True, "clipnorm": 1.0, "initial_accumulator_value": 0.0},
    ),
    "ftrl": (
        "ftrl",
        {"learning_rate": schedule, "learning_rate_power": -0.7, "beta": 0.2}
        | {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.3}
        | {"l2_shrinkage_regularization_strength": 0.05, "clipnorm": 1.0},
    ),
    "ftrl multiplied": (
        "ftrl",
        {"multiply_linear_by_learning_rate": True, "initial_accumulator_value": 0.2}
        | {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.1},
    ),
    "proximal adagrad": (
        "proximal_adagrad",
        {"learning_rate": schedule, "initial_accumulator_value": 0.3}
        | {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.2},
    ),
    "delayed nesterov": ("delayed_nesterov", {"num_delay": 3, "activation": 0.2}),
}


def test_options_of_many_formulas_in_one_program():
    def of(tree):
        return {k: tree[k] for k in ("k", "s", "frozen")}

    options = {k: {"learning_rate": 0.1} | x for k, (_, x) in TOGETHER.items()}
    made = {k: factory(name)(**options[k]) for k, (name, _) in TOGETHER.items()}
    start = of(initial_params())
    grads = [of(g) for g in sequence(1, steps=4)]

    @in_numpy.jit
    def run(params, grads):
        def step(carried, g):
            new = {k: gx.apply_gradients(tx, g, *carried[k]) for k, tx in made.items()}
            carried = {k: (state, params) for k, (params, state) in new.items()}
            return carried, carried

        first = {k: (tx.init(params), params) for k, tx in made.items()}
        return jax.lax.scan(step, first, grads)[1]

    stacked = jax.tree.map(lambda *leaves: np.float32(leaves), *grads)
    found = jax.device_get(run(jax.tree.map(np.float32, start), stacked))
    for k, (name, _) in TOGETHER.items():
        state, params = found[k]
        expected = getattr(oracles, name)(start, iter(grads), **options[k])
        for t, (wanted, *kept) in enumerate(expected):
            agree({leaf: x[t] for leaf, x in params.items()}, wanted, 1e-4)
            for got, each in zip(fields(name, state), kept, strict=False):
                agree({leaf: x[t] for leaf, x in got.items()}, each, 1e-4)


@pytest.mark.parametrize("eps_in_sqrt", [True, False])
@pytest.mark.parametrize(
    "tx",
    [
        lambda e: gx.scale_by_adagrad(0.0, 0.0, eps_in_sqrt=e),
        lambda e: gx.scale_by_novograd(eps=0.0, eps_in_sqrt=e),
    ],
    ids=["adagrad", "novograd"],
)
def test_derivatives_are_finite_where_the_divisor_is_zero(tx, eps_in_sqrt):
    tx = tx(eps_in_sqrt)

    def loss(g):
        return jnp.sum(tx.update(g, tx.init(g))[0])

    assert np.all(np.isfinite(jax.jit(jax.grad(loss))(np.zeros(3, np.float32))))


STACKED = [
    {"weight_decay": 0.1, "clipnorm": 0.5},
    {"global_clipnorm": 1.0, "nesterov": True},
]


@pytest.mark.parametrize("options", STACKED, ids=describe)
@pytest.mark.parametrize("stacked_axes", [{"w": 2, "v": 0}, 1], ids=str)
def test_stacked_layers_equal_unstacked_ones(options, stacked_axes):
    rng = np.random.default_rng(3)

    def draw(t):
        return {
            "w": np.float32(rng.standard_normal((2, 3, 4)) * 10**t),
            "v": np.float32(rng.standard_normal((4, 5))),
        }

    depth = {"w": 1, "v": 1} if stacked_axes == 1 else stacked_axes

    def unstack(tree):
        return {
            f"{k}{i}": np.float64(x[i])
            for k, x in tree.items()
            for i in np.ndindex(x.shape[: depth[k]])
        }

    params, grads = draw(0), [draw(t) for t in range(4)]
    expected = oracles.novograd(unstack(params), map(unstack, grads), 0.1, **options)
    tx = gx.novograd(0.1, stacked_axes=stacked_axes, **options)
    params = jax.tree.map(jnp.asarray, params)
    step = in_numpy.jit(functools.partial(gx.apply_gradients, tx))
    # They start with their first gradient, whenever it comes.
    _, state = tx.update({"w": None, "v": None}, tx.init(params), params)
    for g, (p, _, nu) in zip(grads, expected, strict=True):
        params, state = step(g, state, params)
        agree(unstack(params), p)
        agree(unstack(optax.tree.get(state, "nu")), nu)


@pytest.mark.slow
def test_layers_that_nnx_has_stacked():
    """Its optimizer gives trees of variables. Each layer is normalized for itself."""
    stack = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(4, 2, rngs=rngs)))
    model = nnx.Dict(blocks=stack(nnx.Rngs(0)), head=nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def stacked_axes(tree):
        return jax.tree.map_with_path(
            lambda path, _: int(path[0].key == "blocks"), tree
        )

    optimizer = nnx.Optimizer(
        model, gx.novograd(0.1, stacked_axes=stacked_axes), wrt=nnx.Param
    )
    grads = jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    after, g = nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(grads)
    for part, layers in (("blocks", 3), ("head", 1)):
        for name in ("kernel", "bias"):
            wide = np.float64(g[part][name]).reshape(layers, -1)
            norms = np.linalg.norm(wide, axis=1, keepdims=True)
            moved = np.reshape(after[part][name] - before[part][name], (layers, -1))
            np.testing.assert_allclose(moved, -0.1 * wide / norms, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_mask_may_be_a_function_or_a_prefix():
    params = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "c": jnp.ones(2)}
    grads = jax.tree.map(jnp.zeros_like, params)

    def decayed(mask):
        tx = gx.novograd(1.0, weight_decay=0.5, mask=mask)
        updates, _ = tx.update(grads, tx.init(params), params)
        return jax.tree.map(lambda u: bool(jnp.all(u == -0.5)), updates)

    assert decayed(None) == {"a": {"w": True, "b": True}, "c": True}
    assert decayed({"a": True, "c": False}) == {"a": {"w": True, "b": True}, "c": False}
    assert decayed(lambda p: jax.tree.map(lambda x: x.ndim > 1, p)) == {
        "a": {"w": True, "b": False},
        "c": False,
    }


def test_a_momentum_in_bfloat16_stalls_where_the_docstring_says():
    params = jnp.zeros(1, jnp.bfloat16)
    grads = jnp.ones_like(params)

    def reached(mu_dtype):
        tx = gx.scale_by_novograd(mu_dtype=mu_dtype)
        state, _ = jax.lax.scan(
            lambda state, _: (tx.update(grads, state)[1], None),
            tx.init(params),
            length=500,
        )
        return state.mu.item()

    assert reached(None) == 18.75
    assert reached("float32") == pytest.approx(1 / (1 - 0.95), rel=1e-5)


def test_adagrad_divides_by_the_sum_that_is_stored():
    """Rounding to 8 bits changes it by up to 1/256. No update may be off by that."""
    tx = gx.scale_by_adagrad(accumulator_dtype="bfloat16")
    grads = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.float32)
    state = tx.init(grads)
    for _ in range(3):
        updates, state = tx.update(grads, state)
        stored = np.float64(state.sum_of_squares)
        expected = np.float64(grads) / np.sqrt(stored + 1e-7)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("init", "zeros"), [(lambda f: f, 0), (jax.jit, 2)])
def test_nu_starts_with_the_first_gradient_of_a_layer(init, zeros):
    """Late to ``late`` and to one of two stacked layers. A zero gradient counts."""
    (params,) = sequence(5, steps=1)
    grads = list(sequence(6, steps=5, zeros=zeros))
    expected = [nu for *_, nu in oracles.novograd(params, iter(grads), 0.1)]
    tx = gx.novograd(0.1)
    start = jax.tree.map(jnp.float32, {"early": params, "late": params})
    state, update = init(tx.init)(start), in_numpy.jit(tx.update)
    nothing = jax.tree.map(lambda _: None, params)
    for t in range(3 + len(grads)):
        late = nothing if t < 3 else grads[t - 3]
        pushed = {"early": grads[min(t, 4)], "late": late}
        _, state = update(jax.tree.map(jnp.float32, pushed), state)
        if t >= 3:
            agree(optax.tree.get(state, "nu")["late"], expected[t - 3])


def test_a_row_without_entries_has_no_square():
    params = {"table": jnp.ones((3, 0)), "nothing": jnp.ones((0, 3))}
    tx = gx.adagrad(0.1, row_wise=True, global_clipnorm=1.0)
    updates, state = in_numpy.jit(tx.update)(params, tx.init(params))
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    sums = optax.tree.get(state, "sum_of_squares")
    np.testing.assert_array_equal(sums["table"], np.float32([0.1, 0.1, 0.1]))


@pytest.mark.parametrize("eps_in_sqrt", [True, False])
def test_an_eps_that_is_flushed_to_zero_is_one(eps_in_sqrt):
    zeros = jnp.zeros(2)
    tx = gx.scale_by_adagrad(0.0, 1e-40, eps_in_sqrt=eps_in_sqrt)
    updates, _ = tx.update(zeros, tx.init(zeros))
    assert updates.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("tx", "slot", "expected"),
    [
        (gx.novograd(0.1, global_clipnorm=1e-3), "nu", 1e-6),
        (gx.adagrad(0.1, 0.0, row_wise=True, clipnorm=1e-3), "sum_of_squares", 5e-7),
    ],
    ids=["novograd", "row_wise"],
)
def test_the_square_of_a_small_clip_factor_does_not_underflow(tx, slot, expected):
    grads = {"w": np.float32([[6e17, -8e17]])}
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_allclose(optax.tree.get(state, slot)["w"], expected, rtol=1e-5)


NUMBERS = {"learning_rate": 0.1}
INJECTED = {
    "adagrad": (gx.adagrad, NUMBERS | {"clipnorm": 0.5}),
    "novograd": (gx.novograd, NUMBERS | {"weight_decay": 0.1, "global_clipnorm": 0.5}),
    "in momentum": (
        lambda learning_rate: gx.novograd(learning_rate, lr_in_momentum=True),
        NUMBERS,
    ),
    "delayed": (gx.contrib.delayed_nesterov, NUMBERS | {"num_delay": 1}),
    "clip_by_norm": (gx.clip_by_norm, {"max_norm": 0.5}),
    "rate": (gx.scale_by_learning_rate, NUMBERS),
    "late": (
        lambda power, control: gx.drop_stale(
            optax.chain(gx.scale_by_staleness(power), gx.compensate_delay(control)), 9
        ),
        {"power": 0.5, "control": 0.3},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INJECTED)
def test_numbers_that_inject_hyperparams_made_complex(name):
    """optax casts all its numbers to the first leaf's dtype, and that is complex."""
    make, numbers = INJECTED[name]
    params = {"w": jnp.array([1 + 2j, -0.5j], jnp.complex64)}
    grads = jax.tree.map(lambda p: p * (0.3 - 1j), params)
    extra = {"local_step": 0, "worker_params": grads} if name == "late" else {}
    plain, injected = make(**numbers), optax.inject_hyperparams(make)(**numbers)
    state, expected_state = injected.init(params), plain.init(params)
    assert state.hyperparams[next(iter(numbers))].dtype == jnp.complex64
    update = in_numpy.jit(injected.update)
    for _ in range(2):
        updates, state = update(grads, state, params, **extra)
        expected, expected_state = plain.update(grads, expected_state, params, **extra)
        np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: gx.adagrad(0.1, eps=x), "eps must be a real scalar"),
        (gx.clip_by_norm, "max_norm must be a real scalar"),
        (gx.scale_by_learning_rate, r"learning_rate must be real, got \(0.5\+0.25j\)"),
        (lambda x: gx.novograd(x, lr_in_momentum=True),
         r"learning_rate must be real, got \(0.5\+0.25j\)"),
        (lambda x: gx.novograd(lambda _: x, lr_in_momentum=True).update(
            jnp.ones(2), gx.novograd(0.1).init(jnp.ones(2))),
         r"learning_rate must be real, got \(0.5\+0.25j\)"),
    ],
)  # fmt: skip
def test_numbers_with_an_imaginary_part(make, message):
    with pytest.raises(TypeError, match=message):
        make(0.5 + 0.25j)


def test_rates_of_several_runs_at_once():
    params = jnp.ones(2)

    @jax.vmap
    def step(rate):
        tx = gx.contrib.momentum_look_ahead(rate, 0.5)
        updates, state = tx.update(params, tx.init(params), params)
        return updates, gx.contrib.worker_start(params, state, rate, 0.5)

    updates, start = step(jnp.array([0.0, 1.0]))
    assert updates.tolist() == [[0.0, 0.0], [-1.25, -1.25]]  # m is 1/2, u is 1 + 1/4.
    assert start.tolist() == [[1.0, 1.0], [0.75, 0.75]]
    # As under optax, an array of rates is multiplied by NumPy's rules.
    params, rates = jnp.ones((2, 3)), jnp.array([[0.5], [0.25]])
    grads = jnp.array([[3.0, 0.0, 4.0], [0.0, 0.0, 2.0]])
    for in_momentum in (True, False):
        tx = gx.novograd(rates, stacked_axes=1, lr_in_momentum=in_momentum)
        updates, _ = tx.update(grads, tx.init(params), params)
        expected = [[-0.3, 0.0, -0.4], [0.0, 0.0, -0.25]]
        np.testing.assert_allclose(updates, expected, rtol=1e-6)


def missed(end, by):
    """A schedule that is at its end, but for a rounding; traced where the step is."""
    return lambda count: jnp.asarray(count, jnp.float32) * 0 + (end + by)


CLIP = {"initial_accumulator_value": 1.0}
# (factory, the rest of its arguments, the name of the number, its end, where it misses)
ENDS = [
    *(("adagrad", CLIP, name, 0.0, -1) for name in (
        "eps", "clipnorm", "clipvalue", "global_clipnorm")),
    ("adagrad", {}, "initial_accumulator_value", 0.0, -1),
    ("adagrad", CLIP | {"row_wise": True}, "clipnorm", 0.0, -1),
    *(("ftrl", {}, name, 0.0, -1) for name in (
        "initial_accumulator_value", "l1_regularization_strength",
        "l2_regularization_strength", "l2_shrinkage_regularization_strength",
        "beta", "clipnorm", "clipvalue", "global_clipnorm")),
    ("ftrl", {"initial_accumulator_value": 0.0}, "learning_rate_power", 0.0, 1),
    *(("proximal_adagrad", {}, f"{name}_regularization_strength", 0.0, -1) for name in (
        "l1", "l2")),
    *(("novograd", {"grad_averaging": True, "weight_decay": 0.1}, *rest) for rest in (
        ("b1", 1.0, 1), ("b1", 0.0, -1), ("b2", 1.0, 1), ("b2", 0.0, -1),
        ("eps", 0.0, -1))),
    *(("novograd", {}, name, 0.0, -1) for name in (
        "weight_decay", "clipnorm", "clipvalue", "global_clipnorm")),
    *(("delayed_nesterov", {"num_delay": 3}, *rest) for rest in (
        ("b1", 1.0, 1), ("b1", 0.0, -1), ("activation", 0.0, -1),
        ("activation", 1 / 3, 1))),
    *(("momentum_look_ahead", {}, *rest) for rest in (("b1", 1.0, 1), ("b1", 0.0, -1))),
]  # fmt: skip


def name_of_end(case):
    name, _, argument, end, _ = case
    return f"{name}-{argument}-{end:.2f}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ENDS)), ids=map(name_of_end, ENDS))
def test_a_number_that_misses_its_end_by_a_rounding_is_that_end(number):
    """As compiled schedules do: ``linear_schedule(0.1, 0.0, 5)`` ends at -1.5e-9."""
    name, rest, argument, end, side = ENDS[number]
    static = [k for k, v in rest.items() if isinstance(v, bool) or k == "num_delay"]
    make = optax.inject_hyperparams(factory(name), static_args=static)
    tx = make(**{"learning_rate": 0.1} | rest | {argument: missed(end, side * 1e-6)})
    params, *grads = ({k: x[k] for k in ("b", "k")} for x in sequence(1, steps=4))
    wanted = getattr(oracles, name)
    wanted = list(wanted(params, grads, 0.1, **rest | {argument: end}))
    wrap = (lambda f: f) if number % 2 else in_numpy.jit  # They take turns.
    outer = tx if number % 2 else gx.accumulate(tx, 1)
    step = wrap(functools.partial(gx.apply_gradients, outer))
    got = jax.tree.map(jnp.float32, params)
    state = wrap(outer.init)(got)
    for g, (expected, *_) in zip(grads, wanted, strict=True):
        got, state = step(jax.tree.map(jnp.float32, g), state, got)
        agree(got, expected)


RATES_TO_0 = {
    "linear": optax.linear_schedule(0.1, 0.0, 5),
    "up and down": optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 2), optax.linear_schedule(0.1, 0.0, 5)], [2]
    ),
    "warm-up": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 7),
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")  # Optax's cosine needs it.
@pytest.mark.parametrize(
    ("name", "rate", "way"),
    [
        ("ftrl", "linear", "plain"),
        ("ftrl", "up and down", "injected"),
        ("ftrl", "warm-up", "in a sum"),
        ("proximal_adagrad", "linear", "injected"),
        ("proximal_adagrad", "up and down", "in a sum"),
        ("proximal_adagrad", "warm-up", "plain"),
    ],
)
def test_parameters_stay_where_a_rate_has_ended(name, rate, way):
    rate, make = RATES_TO_0[rate], getattr(gx, name)
    params, *grads = ({k: x[k] for k in ("b", "k")} for x in sequence(1, steps=11))
    rates = [max(0.0, float(rate(t))) for t in range(10)]
    # FTRL has no formula for 0. The other one's sum of squares grows all the same.
    moves = [t for t in range(10) if name != "ftrl" or rates[t] > 1e-8]
    wanted = getattr(oracles, name)(
        params, [grads[t] for t in moves], lambda i: rates[moves[i]]
    )
    wanted = dict(zip(moves, (p for p, *_ in wanted), strict=True))
    tx = make(rate) if way == "plain" else optax.inject_hyperparams(make)(rate)
    tx = gx.accumulate(tx, 1) if way == "in a sum" else tx
    step = functools.partial(gx.apply_gradients, tx)
    step = step if way == "injected" else in_numpy.jit(step)
    got, expected = jax.tree.map(jnp.float32, params), params
    state = tx.init(got)
    for t, g in enumerate(grads):
        expected = wanted.get(t, expected)
        got, state = step(jax.tree.map(jnp.float32, g), state, got)
        agree(got, expected)


@pytest.mark.parametrize("make", [gx.ftrl, gx.proximal_adagrad])
def test_a_rate_that_is_really_negative_is_none(make):
    g = jnp.ones(2)
    for tx in (make(missed(0.0, -1e-4)), optax.inject_hyperparams(make)(0.1)):
        state = tx.init(g)
        if hasattr(state, "hyperparams"):
            state.hyperparams["learning_rate"] = jnp.float32(-1e-4)
        with pytest.raises(ValueError, match=r"learning_rate must be in \[0, inf\)"):
            tx.update(g, state, g)
        assert jnp.isnan(jax.jit(tx.update)(g, state, g)[0]).all()
    assert jnp.all(make(0.0).update(g, make(0.0).init(g), g)[0] == 0)
