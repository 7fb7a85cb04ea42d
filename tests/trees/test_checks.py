"""What is refused wherever it is given: words for bools, numbers that JAX would make
inf, complex gradients of real parameters, and the state of another optimizer."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._checks import arguments
from gradxform._rows import opaque

W = jnp.ones(3)
INNER = optax.sgd(1.0)


def loss(w, x=None):
    return jnp.sum(w**2)


FLAGS = {
    "skip_nonfinite": lambda no: gx.accumulate(INNER, 2, skip_nonfinite=no),
    "row_wise": lambda no: gx.adagrad(0.1, row_wise=no),
    "eps_in_sqrt": lambda no: gx.scale_by_novograd(eps_in_sqrt=no),
    "eps_in_sqrt of adagrad": lambda no: gx.adagrad(0.1, eps_in_sqrt=no),
    "nesterov": lambda no: gx.novograd(0.1, nesterov=no),
    "grad_averaging": lambda no: gx.novograd(0.1, grad_averaging=no),
    "lr_in_momentum": lambda no: gx.novograd(0.1, lr_in_momentum=no),
    "multiply_linear_by_learning_rate": lambda no: gx.ftrl(
        0.1, multiply_linear_by_learning_rate=no
    ),
    "donate": lambda no: gx.minimize(loss, INNER, donate=no),
    "donate of local_steps": lambda no: gx.local_steps(loss, INNER, donate=no),
    "donate of a server": lambda no: gx.ParameterServer(W, INNER, donate=no),
    "has_aux": lambda no: gx.value_and_grad(loss, has_aux=no),
    "require_finite": lambda no: gx.ParameterServer(W, INNER, require_finite=no),
    "resume": lambda no: gx.engines.Checkpoint.of(
        gx.engines.Checkpoint("folder", resume=no)
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("name", FLAGS)
def test_a_word_is_no_bool(name):
    flag, *_ = name.split()
    with pytest.raises(TypeError, match=f"{flag} must be True or False.*got 'no'"):
        FLAGS[name]("no")
    gx.accumulate(INNER, 2, skip_nonfinite=np.True_)


LARGE = {
    "factors": lambda: gx.contrib.scale_by_worker([1.0, 1e39]),
    "weight": lambda: gx.scale_by_staleness(weight=lambda s: 1e39).update(
        W, optax.EmptyState(), staleness=1
    ),
    "learning_rate": lambda: gx.ftrl(1e39),
    "learning_rate_power": lambda: gx.ftrl(0.1, -1e39),
    "eps": lambda: gx.adagrad(0.1, eps=1e39),
    "weight_decay": lambda: gx.novograd(0.1, weight_decay=10**39),
    "variance_control": lambda: gx.compensate_delay(1e39),
}


@pytest.mark.every
@pytest.mark.parametrize("name", LARGE)
def test_a_number_that_float32_makes_infinite_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}.* must be finite in float32, got"):
        LARGE[name]()
    with jax.enable_x64(True):
        LARGE[name]()
    gx.clip_by_norm(1e39)  # A limit may be larger than every number.
    gx.adagrad(0.1, clipvalue=np.inf)


COMPLEX = {
    "ftrl": gx.ftrl(0.1),
    "proximal_adagrad": gx.proximal_adagrad(0.1),
    "adagrad, row-wise": gx.scale_by_adagrad(row_wise=True),
    "novograd": gx.novograd(0.1),
    "accumulate": gx.accumulate(INNER, 1),
    "worker_mean": gx.worker_mean(INNER, 1, method="latest"),
}


@pytest.mark.every
@pytest.mark.parametrize("name", COMPLEX)
def test_no_imaginary_part_is_lost(name):
    tx, g = COMPLEX[name], jnp.array([1j, 1, 1], jnp.complex64)
    state = tx.init(W)
    with pytest.raises(TypeError, match=r"complex64.* float32"):
        tx.update(g, state, W, **{"worker": 0} if name == "worker_mean" else {})
    with pytest.raises(TypeError, match=r"complex64\[3\], params has float32\[3\]"):
        gx.apply_updates(W, g)
    gx.apply_updates(g, W)  # A real update of a complex parameter loses nothing.


OTHER = {
    "a tuple": (gx.ftrl(0.1), optax.adam(0.1), "root.* node tuple,.*FtrlState"),
    "a link": (
        gx.adagrad(0.1),
        optax.adam(0.1),
        r"\[0\] it has a node .*ScaleByAdamState, .*ScaleByAdagradState",
    ),
    "a gate": (gx.drop_stale(INNER, 1), INNER, "root.* node tuple.*DropStaleState"),
    "optax's": (
        optax.adam(0.1),
        gx.adagrad(0.1),
        r"\[0\].*ScaleByAdagradState, .*ScaleByAdamState",
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_the_state_of_another_optimizer_is_named(case):
    tx, other, match = OTHER[case]
    extra = {"local_step": 0} if case == "a gate" else {}
    with pytest.raises(TypeError, match=f"state is not that of tx: at .*{match}"):
        gx.apply_gradients(tx, W, other.init(W), W, **extra)


GRADS = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}
SIZES = {
    "lazy": (gx.lazy(optax.adam(0.1)), r"\[0\].mu"),
    "low_bit_state": (
        gx.low_bit_state(optax.adam(0.1), min_size=1, block_size=8),
        r".inner_state\[0\].mu",
    ),
    "skip_spikes": (gx.skip_spikes(optax.adam(0.1)), r".inner_state\[0\].mu"),
    "master_weights": (gx.master_weights(optax.trace(0.9)), r".inner_state.trace"),
    "accumulate": (gx.accumulate(optax.sgd(0.1), 2), r".accumulated"),
    "optax's": (optax.chain(optax.clip(1.0), optax.trace(0.9)), r"\[1\].trace"),
}


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 1) for name in SIZES),
        *(("lazy", 8), ("optax's", 8)),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in [*SIZES][1:-1]),
    ],
)
def test_a_state_of_another_size_is_named(name, rows):
    """Also where one row would be broadcast, and the step would run."""
    tx, field = SIZES[name]
    other = {"w": jnp.ones((rows, 4)), "b": jnp.ones(4)}
    words = rf"state is not that of tx: at {field}\['w'\] it has .*{rows},4\].*6,4\]"
    grads = GRADS
    if name == "lazy":
        grads = {**GRADS, "w": gx.IndexedSlices([1], jnp.ones((1, 4)), (6, 4))}
    apply = functools.partial(gx.apply_gradients, tx)
    with pytest.raises(TypeError, match=words):
        jax.eval_shape(apply, grads, tx.init(other), GRADS)
    if name == "low_bit_state" and rows == 8:
        with pytest.raises(TypeError, match=words):
            tx.update(grads, tx.init(other), GRADS)


RATES = {
    "adagrad": gx.adagrad,
    "novograd": gx.novograd,
    "ftrl": gx.ftrl,
    "proximal_adagrad": gx.proximal_adagrad,
    "scale_by_learning_rate": gx.scale_by_learning_rate,
    "in the momentum": lambda rate: gx.novograd(rate, lr_in_momentum=True),
    "delayed_nesterov": lambda rate: gx.contrib.delayed_nesterov(rate, num_delay=2),
    "momentum_look_ahead": gx.contrib.momentum_look_ahead,
}


@pytest.mark.every
@pytest.mark.parametrize("name", RATES)
def test_what_is_no_rate_is_refused_at_once(name):
    for rate in ([0.1, 0.2], "0.1", None, {"w": 0.1}, 0.1j):
        words = rf"learning_rate must be .*real.*got {re.escape(repr(rate))}"
        with pytest.raises(TypeError, match=words):
            RATES[name](rate)
    RATES[name](np.float32(0.1))


class Module(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    act: object = jax.nn.relu

    def __call__(self, x):
        return jnp.sum(self.act(self.dropout(self.linear(x), inference=True)))


MODULE = Module(eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.1))
WHOLE = {
    "adagrad": lambda: gx.adagrad(0.1),
    "novograd": lambda: gx.novograd(0.1),
    "drop_stale": lambda: gx.drop_stale(INNER, 1),
    "accumulate": lambda: gx.accumulate(optax.adam(0.1), 2),
    "lazy": lambda: gx.lazy(optax.adam(0.1)),
    "low_bit_state": lambda: gx.low_bit_state(optax.adam(0.1)),
    "measure_norms": gx.measure_norms,
}


@pytest.mark.every
@pytest.mark.parametrize("name", WHOLE)
def test_a_module_with_functions_has_no_state(name):
    words = r"params has .*relu|params has .*custom_jvp"
    with pytest.raises(TypeError, match=rf"({words}).* at \.act.*eqx\.partition"):
        WHOLE[name]().init(MODULE)


@pytest.mark.slow
def test_a_module_that_is_divided_learns():
    """All of it has a bool that has no derivative, with its path in the error."""
    tx = optax.sgd(0.1)
    step = gx.minimize(lambda module, x: module(x), tx)
    whole = eqx.tree_at(lambda m: m.act, MODULE, None)
    state = tx.init(eqx.filter(whole, eqx.is_inexact_array))
    words = r"params has bool\[\] at \.dropout\.inference.*trainable.*eqx\.partition"
    with pytest.raises(TypeError, match=words):
        step(whole, state, jnp.ones(2))
    params, rest = eqx.partition(MODULE, eqx.is_inexact_array)
    step = gx.minimize(lambda params, x: eqx.combine(params, rest)(x), tx, donate=False)
    new, _, _ = step(params, tx.init(params), jnp.ones(2))
    grads = eqx.filter_grad(lambda module: module(jnp.ones(2)))(MODULE)
    wanted = MODULE.linear.weight - 0.1 * grads.linear.weight
    np.testing.assert_allclose(new.linear.weight, wanted, rtol=1e-6)


def test_another_attribute_error_stays():
    def fail(*_):
        raise AttributeError("of the transformation")

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), fail)
    with pytest.raises(AttributeError, match="of the transformation"):
        gx.apply_gradients(tx, W, tx.init(W), W)


@pytest.mark.slow
def test_a_whole_nnx_module_is_named():
    module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(module)
    tx = gx.adagrad(0.1)
    with pytest.raises(TypeError, match=r"params is nnx\.state\(module, nnx\.Param\)"):
        gx.apply_gradients(tx, grads, tx.init(module), module)
    params = nnx.state(module, nnx.Param)
    new, _ = gx.apply_gradients(tx, grads, tx.init(params), params)
    assert jax.tree.leaves(new)[0] < 0  # The bias.


@pytest.mark.slow
def test_a_whole_equinox_module_is_named():
    module = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    tx = gx.adagrad(0.1)
    arrays = eqx.filter(module, eqx.is_inexact_array)
    match = r"params has .* at \.activation, which is no array.*eqx\.partition"
    for call in (
        lambda: gx.ParameterServer(module, tx),
        lambda: gx.minimize(loss, tx)(module, tx.init(arrays)),
        lambda: gx.local_steps(loss, tx)(module, tx.init(arrays), jnp.ones((1, 2))),
    ):
        with pytest.raises(TypeError, match=match):
            call()
    gx.ParameterServer(arrays, tx)


TABLE = jnp.zeros((8, 2))
TWINS = {"a/b": TABLE, "a": {"b": TABLE, "c": TABLE}}


def pull(name):
    server = gx.ParameterServer(TWINS, optax.sgd(0.1))
    return server.pull(rows={name: [1]})[0]


def gradients(name):
    gradient = gx.value_and_grad(lambda p: jnp.sum(p["a"]["c"][1]), tables=[name])
    return gradient(TWINS)[1]


def keep(name):
    tx = gx.low_bit_state(optax.trace(0.9), min_size=1, keep=[f"trace/{name}"])
    return tx.init(TWINS).inner_state.trace


@pytest.mark.parametrize("use", [pull, gradients, keep])
def test_a_name_of_two_leaves_is_an_error_with_both(use):
    """A key may hold a slash. Without the error one of the two would be taken."""
    with pytest.raises(ValueError, match=r"\['a'\]\['b'\] and .*\['a/b'\]\. Rename"):
        use("a/b")
    by_name, other = (use("a/c")["a"][key] for key in "cb")
    assert (type(by_name), by_name.dtype) != (type(other), other.dtype)


FROZEN = freeze({"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)})
SGD = optax.sgd(0.1)


def with_mask(mask):
    gx.novograd(0.1, weight_decay=0.1, mask=mask).init(FROZEN)


def with_stacked_axes(axes):
    gx.novograd(0.1, stacked_axes=axes).init(FROZEN)


def with_trainable(trainable):
    gx.minimize(loss, SGD, trainable=trainable)(FROZEN, SGD.init(FROZEN))


def of_a_worker(trainable):
    steps = gx.local_steps(loss, SGD, trainable=trainable)
    steps(FROZEN, SGD.init(FROZEN), jnp.ones(2))


def with_axis_name(specs):
    gx.global_norm(FROZEN, axis_name=specs)


@pytest.mark.every
@pytest.mark.parametrize(
    ("call", "name", "value", "reference"),
    [
        (with_mask, "mask", True, "params"),
        (with_stacked_axes, "stacked_axes", 0, "params"),
        (with_trainable, "trainable", True, "params"),
        (of_a_worker, "trainable", True, "params"),
        (with_axis_name, "axis_name", P(), "updates"),
    ],
    ids=["mask", "stacked_axes", "trainable", "local_steps", "axis_name"],
)
@pytest.mark.parametrize(
    ("tree", "where"),
    [
        (lambda x: {"a": x}, r"{0} has no value for {1} at \['b'\]\."),
        (lambda x: {"a": {"v": x}, "b": x}, r"{0} has .* at \['a'\]\['v'\], where {1}"),
        (lambda x: {"a": x, "b": {"x": x}}, r"{0} has no value for {1} at \['b'\]\."),
        # A function gives a tree, too.
        (lambda x: lambda _: {"b": x}, r"{0} has no value for {1} at \['a'\]\['w'\]"),
    ],
    ids=["a key too few", "another key", "too deep", "function"],
)
def test_a_prefix_that_does_not_fit_is_named(call, name, value, reference, tree, where):
    match = where.format(name, reference) + ".*Pass one value, or a tree"
    with pytest.raises(TypeError, match=match):
        call(tree(value))


@pytest.mark.parametrize("kind", [freeze, dict, lambda tree: lambda _: tree])
def test_a_prefix_with_the_same_keys_fits(kind):
    """A config has only dicts, also for parameters in other nodes."""
    with_mask(kind({"a": True, "b": False}))
    with_mask(None)
    with_axis_name(kind({"a": P(), "b": P()}))
    axes = kind({"a": {"w": 1}, "b": 0})
    state = gx.scale_by_novograd(stacked_axes=axes).init(FROZEN)
    assert jax.tree.map(jnp.shape, state.nu) == freeze({"a": {"w": (2,)}, "b": ()})


@pytest.mark.every
@pytest.mark.parametrize("params", [{}, {"a": None}, ()])
def test_no_parameters_at_all(params):
    with pytest.raises(ValueError, match=r"params has no array, got .*at least one"):
        gx.ParameterServer(params, SGD)


def test_another_thread_may_import_the_same_module_of_jax(monkeypatch):
    """``jax`` gets ``extend`` as an attribute when the import is done."""
    monkeypatch.delattr(jax, "extend", raising=False)
    arguments.check_not_tracing("pull")
    assert opaque._opaque.__wrapped__()


def near(number):
    """A schedule that misses a number by a rounding, on the side that matters."""
    return lambda count: jnp.asarray(count, jnp.float32) * 0 + number


def pushed(tx, *pushes):
    """The parameters after gradients of 1, from 0."""
    w = jnp.zeros(())
    state = tx.init(w)
    for push in pushes:
        given = push if isinstance(push, dict) else {"local_step": push}
        given = {"grad": 1.0} | given
        grad = jnp.asarray(given.pop("grad"))
        w, state = gx.apply_gradients(tx, grad, state, w, **given)
    return w


def weighted(s):
    return jnp.asarray(s, jnp.float32) * 0 - 1e-6


def stale(limit, *steps):
    return lambda: pushed(gx.drop_stale(INNER, near(limit)), *steps)


def summed(number, *pushes):
    return lambda: pushed(gx.accumulate(INNER, number), *pushes)


def late_sum(*pushes, **options):
    return lambda: pushed(gx.conditional_accumulator(INNER, 1, **options), *pushes)


NAN = {"grad": np.nan, "local_step": 0}
# What the program of each gate gives, and what the very end gives.
GATES = {
    "max_staleness to 0": (stale(-1e-6, 0, 1), -2),
    "max_staleness to 1": (stale(1 - 1e-6, 0, 0, 0), -2),
    "max_staleness of a sum": (late_sum(0, 0, 0, max_staleness=near(1 - 1e-6)), -2),
    "num_required to 2": (summed(near(2 + 1e-6), {}, {}), -1),
    "num_required to 1": (summed(near(1 - 1e-6), {}), -1),
    "weight to 0": (
        lambda: pushed(
            gx.accumulate(INNER, 1), {"grad": np.nan, "weight": weighted(0)}
        ),
        0,
    ),
    "weight by staleness": (late_sum(NAN, weight=weighted), 0),
    "power to 0": (lambda: scaled(gx.scale_by_staleness, staleness=3), 1),
    "variance_control to 0": (
        lambda: scaled(gx.compensate_delay, worker_params=jnp.full(1, -1e6)),
        1,
    ),
    "factors to 0": (
        lambda: scaled(
            lambda x: gx.contrib.scale_by_worker(jnp.stack([x, x])), worker=1
        ),
        0,
    ),
    "sigmas to 0": (  # The third is the mean of the first two.
        lambda: pushed(
            gx.skip_spikes(INNER, window=4, sigmas=weighted(0)),
            *[{"grad": g} for g in (1.0, 3.0, 2.0)],
        ),
        -6,
    ),
    "max_norm to 0": (lambda: scaled(gx.clip_by_global_norm), 0),
    "max_norm of a leaf to 0": (lambda: scaled(gx.clip_by_norm), 0),
}


def scaled(make, **extra):
    """The update for a gradient of 1, with a number that misses 0."""
    g = jnp.ones(1)
    tx = make(weighted(0))
    return tx.update(g, tx.init(g), 0 * g, **extra)[0][0]


@pytest.mark.parametrize("case", GATES)
def test_a_schedule_that_misses_a_number_by_a_rounding_gives_that_number(case):
    given, wanted = GATES[case]
    for run in (given, jax.jit(given)):
        np.testing.assert_array_equal(np.float64(run()), wanted)


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), -1e-9])
def test_what_misses_by_more_and_what_a_person_writes_is_refused(number):
    """An array may come from a schedule, and so be the end of a range."""
    with pytest.raises(ValueError, match=r"b1 must be in \[0, 1\)"):
        gx.novograd(0.1, b1=number)
    gx.novograd(0.1, b1=jnp.float32(number))
    for wrong in (-1e-5, np.nan):
        with pytest.raises(ValueError, match=r"max_norm must be in \[0, inf\]"):
            gx.clip_by_norm(jnp.float32(wrong))
    with pytest.raises(ValueError, match=r"b1 must be in \[0, 1\)"):
        gx.novograd(0.1, b1=jnp.float32(1.00001))
    assert pushed(gx.drop_stale(INNER, near(0.999)), 0, 0) == -1
