"""``gradxform.keras.Optimizer`` in ``fit``, beside the optimizers of Keras."""

import functools
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests import test_frameworks
from tests.conftest import NEWEST_JAX

pytestmark = [
    pytest.mark.slow,
    # NumPy asks Keras's variables for a copy in a way that they do not know.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 8)).astype(np.float32)
Y = (X @ RNG.standard_normal((8, 1))).astype(np.float32)


@pytest.fixture
def k(monkeypatch, standard_promotion):
    """Keras on JAX, and this library's optimizer for it."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    import keras

    from gradxform.keras import Optimizer

    yield SimpleNamespace(keras=keras, Optimizer=Optimizer)
    keras.distribution.set_distribution(None)
    keras.config.set_dtype_policy("float32")


def new_model(k):
    """The same model with the same parameters, each time."""
    k.keras.utils.set_random_seed(0)
    layers = k.keras.layers
    return k.keras.Sequential(
        [
            k.keras.Input((8,), name="x"),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dense(1, name="out"),
        ],
        name="net",
    )


def compiled(k, optimizer, **options):
    model = new_model(k)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def train(k, optimizer, epochs=3, callbacks=None, **options):
    model = compiled(k, optimizer, **options)
    history = fit(model, epochs=epochs, callbacks=callbacks)
    return model, history.history


def fit(model, **kwargs):
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **kwargs)


def values(variables):
    return [np.asarray(v.value) for v in variables]


def assert_close(variables, others, rtol=1e-6, atol=1e-6):
    for a, b in zip(values(variables), values(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_stayed(start, variables):
    """They still have the values that they had at the start."""
    for a, b in zip(start, values(variables), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_equal(variables, others):
    for a, b in zip(variables, others, strict=True):
        np.testing.assert_array_equal(a.value, b.value, err_msg=a.path)


def test_adagrad_trains_as_that_of_keras(k):
    clipped = k.keras.optimizers.Adagrad(0.1, global_clipnorm=1.0)
    theirs, expected = train(k, clipped, metrics=["mae"])
    tx = gx.adagrad(0.1, global_clipnorm=1.0)
    ours, history = train(k, k.Optimizer(tx), metrics=["mae"])
    assert_close(ours.weights, theirs.weights)
    assert history.keys() == expected.keys() == {"loss", "mae"}
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-6)
    sums = [v for v in ours.optimizer.variables if "sum_of_squares" in v.path]
    assert_close(sums, theirs.optimizer.variables[2:])
    assert int(ours.optimizer.iterations) == 24


@pytest.mark.parametrize(
    "settings",
    [{"jit_compile": False}, {"run_eagerly": True}, {"steps_per_execution": 3}],
    ids=str,
)
def test_a_setting_of_compile_changes_no_numbers(k, settings):
    expected, _ = train(k, k.Optimizer(optax.adam(0.01)))
    model, _ = train(k, k.Optimizer(optax.adam(0.01)), **settings)
    assert_close(model.weights, expected.weights)
    assert int(model.optimizer.iterations) == 24


def shared_layer(k):
    layers, x = k.keras.layers, k.keras.Input((8,))
    twice = layers.Dense(8, activation="tanh")
    return k.keras.Model(x, layers.Dense(1)(twice(twice(x))))


def frozen_layer(k):
    model = new_model(k)
    model.layers[0].trainable = False
    return model


def layers_of_one_name(k):
    def half():
        layers = [k.keras.layers.Dense(8, name=name) for name in ("a", "b")]
        return k.keras.Sequential([k.keras.Input((8,)), *layers], name="half")

    class Halves(k.keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = half(), half()
            self.norm = k.keras.layers.BatchNormalization()
            self.out = k.keras.layers.Dense(1, name="a")

        def call(self, x, training=False):
            x = self.norm(self.second(self.first(x)), training=training)
            return self.out(x)

    return Halves()


def constraints(k):
    layers = k.keras.layers
    return k.keras.Sequential(
        [
            k.keras.Input((8,)),
            layers.Dense(16, kernel_constraint="non_neg", kernel_regularizer="l2"),
            layers.Dropout(0.2, seed=1),
            layers.Dense(1, kernel_constraint=k.keras.constraints.MaxNorm(0.3)),
        ]
    )


def eight_bits(k):
    model = new_model(k)
    for layer in model.layers:  # Its scales are trainable, and have no gradient.
        layer.quantize("float8")
    return model


@pytest.mark.parametrize(
    "make", [shared_layer, frozen_layer, layers_of_one_name, constraints, eight_bits]
)
def test_any_model_trains_as_with_keras(k, make):
    models = []
    for tx in (k.keras.optimizers.Adagrad(0.1), k.Optimizer(gx.adagrad(0.1))):
        k.keras.utils.set_random_seed(0)
        models.append(make(k))
        models[-1].compile(optimizer=tx, loss="mse")
        start = values(models[-1].weights)
        fit(models[-1], epochs=2)
        models[-1].train_on_batch(X[:8], Y[:8])
        fit(models[-1])
    theirs, ours = models
    assert len(ours.optimizer.variables) == len(ours.trainable_variables) + 1
    assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-5)
    assert any(np.any(a != b) for a, b in zip(start, values(ours.weights), strict=True))


@pytest.mark.parametrize("inject", [False, True])
def test_a_schedule_of_keras_is_one_of_optax(k, inject):
    schedule = k.keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    expected, _ = train(k, k.keras.optimizers.SGD(schedule))
    sgd = optax.inject_hyperparams(optax.sgd) if inject else optax.sgd
    model, _ = train(k, k.Optimizer(sgd(schedule)))
    assert_close(model.weights, expected.weights)


def test_injected_numbers_in_half_precision(k):
    """As the page says: by default optax rounds them to the parameters' bfloat16."""
    k.keras.config.set_dtype_policy("bfloat16")
    for more in {}, {"hyperparam_dtype": jnp.float32}:
        tx = optax.inject_hyperparams(optax.adam, **more)(0.01)
        _, history = train(k, k.Optimizer(tx), epochs=1)
        assert np.isfinite(history["loss"][-1]) == bool(more)


def in_half():
    tx = gx.low_bit_state(optax.adamw(2**-10), min_size=64)
    return gx.master_weights(tx, residual_dtype="int8")


def test_a_model_in_bfloat16_takes_small_steps(k, tmp_path):
    """Its loss falls as in float32; without master weights half of that."""

    def trained(tx, policy):
        k.keras.config.set_dtype_policy(policy)
        model, history = train(k, k.Optimizer(tx), epochs=10)
        return model, history["loss"]

    _, full = trained(optax.adamw(2**-10), "float32")
    model, loss = trained(in_half(), "bfloat16")
    _, plain = trained(optax.adamw(2**-10), "bfloat16")
    assert {v.dtype for v in model.trainable_variables} == {"bfloat16"}
    fell, fell_in_float32 = loss[0] - loss[-1], full[0] - full[-1]
    assert fell > 0.8 * fell_in_float32
    assert plain[0] - plain[-1] < 0.65 * fell_in_float32
    # Weights and state are saved and read, and training goes on from them.
    model.save_weights(tmp_path / "of.weights.h5")
    fit(model)
    other = compiled(k, k.Optimizer(in_half()))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "of.weights.h5")
    kinds = ([v.dtype for v in m.optimizer.variables] for m in (other, model))
    assert next(kinds) == next(kinds)
    k.keras.config.set_dtype_policy("bfloat16")
    fit(other)
    assert_equal(other.weights, model.weights)
    assert_equal(other.optimizer.variables, model.optimizer.variables)


STEPS = {
    "accumulate": lambda tx: gx.accumulate(tx, 2),
    "conditional_accumulator": lambda tx: gx.conditional_accumulator(tx, 2),
    "a gate inside": lambda tx: gx.accumulate(gx.drop_stale(tx, 0), 2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", STEPS)
def test_two_batches_make_one_step(k, name):
    whole = compiled(k, k.Optimizer(gx.adagrad(0.1)))
    whole.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    halves, _ = train(k, k.Optimizer(STEPS[name](gx.adagrad(0.1))), epochs=1)
    assert_close(halves.weights, whole.weights, rtol=1e-5)
    assert int(halves.optimizer.iterations) == 8


def test_variables_that_are_overwritten_take_each_batch(k):
    """Keras's own accumulation gives them the maximum of a step, as the page says."""
    sgd = k.keras.optimizers.SGD
    for optimizer, wanted in (
        (k.Optimizer(gx.accumulate(optax.sgd(1.0), 2)), [1.0, 3.0, 2.0, 1.0]),
        (sgd(1.0, gradient_accumulation_steps=2), [0.0, 3.0, 3.0, 2.0]),
        (k.Optimizer(optax.sgd(1.0)), [1.0, 3.0, 2.0, 1.0]),
        (sgd(1.0), [1.0, 3.0, 2.0, 1.0]),
    ):
        number, weight = (k.keras.Variable(np.zeros(2)) for _ in range(2))
        number.overwrite_with_gradient = True
        seen = []
        for new in (1.0, 3.0, 2.0, 1.0):
            grads = [np.full(2, new, np.float32), np.ones(2, np.float32)]
            optimizer.apply(grads, [number, weight])
            seen.append(float(number.value[0]))
        assert seen == wanted


def test_no_gradient_is_late_for_gates_side_by_side(k):
    """One of them steps with every batch, and one with every second."""

    def labels(params):
        return jax.tree.map_with_path(lambda path, _: path[0].key[-4:], params)

    gates = {
        "rnel": gx.drop_stale(gx.adagrad(0.1), 0),
        "bias": gx.conditional_accumulator(gx.adagrad(0.1), 2),
    }
    steps = {"rnel": gx.adagrad(0.1), "bias": gx.accumulate(gx.adagrad(0.1), 2)}
    expected, _ = train(k, k.Optimizer(optax.partition(steps, labels)))
    model, _ = train(k, k.Optimizer(optax.partition(gates, labels)))
    assert_close(model.weights, expected.weights)
    counts = {v.path.rpartition("/")[2]: v for v in model.optimizer.variables}
    counts = {name: int(v.value) for name, v in counts.items() if v.shape == ()}
    assert sorted(n for x, n in counts.items() if "global_step" in x) == [12, 24]
    assert [n for x, n in counts.items() if "stale_count" in x] == [0, 0]


class OwnState(NamedTuple):
    """A user's state, with a field that gates have, too."""

    global_step: jax.Array


OWN = optax.GradientTransformation(
    lambda _: OwnState(jnp.full(2, 7.5)), lambda updates, state, _: (updates, state)
)


@pytest.mark.parametrize(
    ("link", "name"), [(OWN, "w"), (optax.trace(0.5), "global_step")]
)
def test_a_users_state_or_variable_may_be_called_global_step(k, link, name):
    variable = k.keras.Variable(np.float32([2.0, 3.0]), name=name)
    tx = optax.chain(link, gx.drop_stale(optax.sgd(1.0), 0))
    k.Optimizer(tx).apply([jnp.float32([1.0, 1.0])], [variable])
    np.testing.assert_array_equal(variable.value, [1.0, 2.0])


@pytest.mark.parametrize("n_dense", [0, 1])
def test_a_sparse_gradient_of_jax_is_that_of_keras(k, n_dense):
    dense = jnp.float32([[0.0, 0.0], [1.0, -2.0], [0.0, 0.0]])
    grad = jax.experimental.sparse.BCOO.fromdense(dense, n_dense=n_dense)
    ours, theirs = (k.keras.Variable(np.ones((3, 2)), name="table") for _ in range(2))
    for _ in range(2):
        k.Optimizer(gx.adagrad(0.5)).apply([grad], [ours])
        k.keras.optimizers.Adagrad(0.5).apply([grad], [theirs])
    assert_close([ours], [theirs])
    assert np.all((values([ours])[0] == 1) == (dense == 0))


def test_an_extra_argument_that_keras_does_not_give_is_an_error(k):
    for tx, missing in (
        (gx.compensate_delay(), "worker_params"),
        (optax.contrib.reduce_on_plateau(), "value"),
    ):
        model = compiled(k, k.Optimizer(tx))
        before = values(model.weights)
        with pytest.raises(TypeError, match=f"Keras gives .*{missing}"):
            fit(model)
        assert not model.optimizer.built
        assert_stayed(before, model.weights)


def test_only_a_transformation_is_taken(k):
    for tx in (optax.adam, lambda: None, 0.1, optax.MultiSteps(optax.sgd(0.1), 2)):
        with pytest.raises(TypeError, match=r"GradientTransformation|argument"):
            k.Optimizer(tx)


def test_a_rate_that_no_state_holds_is_an_error(k):
    injected = optax.inject_hyperparams(optax.sgd)
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    for tx, error in (
        (optax.sgd(0.1), "holds 0 learning rates"),
        (optax.chain(injected(0.1), injected(0.1)), "holds 2 learning rates"),
        (injected(schedule), "comes from a schedule"),
    ):
        optimizer = k.Optimizer(tx)
        with pytest.raises(AttributeError, match=error):
            optimizer.learning_rate = 0.5
        optimizer.build(new_model(k).trainable_variables)
        with pytest.raises(AttributeError, match=error):
            optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate.value) == pytest.approx(0.1)


def test_a_rate_set_before_fit_is_kept(k):
    expected, _ = train(k, k.keras.optimizers.SGD(0.0625))
    optimizer = k.Optimizer(optax.inject_hyperparams(optax.sgd)(7.0))
    model = compiled(k, optimizer)
    assert float(optimizer.learning_rate) == 7.0
    optimizer.learning_rate = 0.125
    optimizer.learning_rate.assign(optimizer.learning_rate / 2)
    assert len(optimizer.variables) == 1  # Its place among them is that of the leaf.
    fit(model, epochs=3)
    assert_close(model.weights, expected.weights)
    schedule = k.keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    for unset in (optimizer, k.Optimizer(optax.inject_hyperparams(optax.sgd)(7.0))):
        with pytest.raises(TypeError, match="ExponentialDecay"):
            unset.learning_rate = schedule


def test_an_optimizer_without_variables_has_a_rate(k):
    """Keras builds the default of a ``MultiOptimizer`` only if a variable is left."""
    ours, others = (
        k.Optimizer(optax.inject_hyperparams(optax.sgd)(0.5)) for _ in range(2)
    )
    of_all = k.keras.optimizers.OptimizerMap(others, {"net/.*": ours})
    multi = k.keras.optimizers.MultiOptimizer(of_all)
    halve = k.keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 16)
    model, history = train(k, multi, callbacks=[halve])
    assert not others.built
    for each in (ours, others):
        assert history[f"learning_rate_{each.name}"] == [2**-5, 2**-9, 2**-13]
    schedule = optax.piecewise_constant_schedule(2**-5, {8: 2**-4, 16: 2**-4})
    expected, _ = train(k, k.Optimizer(optax.sgd(schedule)))
    assert_close(model.weights, expected.weights)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_model_with_nothing_trainable_is_evaluated(k, policy):
    k.keras.config.set_dtype_policy(policy)
    for tx in (gx.drop_stale(gx.novograd(0.1, global_clipnorm=1.0), 0), optax.adam(1)):
        model = new_model(k)
        model.trainable = False
        model.compile(optimizer=k.Optimizer(tx), loss="mse")
        start = values(model.weights)
        loss = fit(model).history["loss"]
        np.testing.assert_allclose(loss, model.evaluate(X, Y, verbose=0), rtol=1e-2)
        assert_stayed(start, model.weights)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_in_hdf5_is_loaded(k, tmp_path):
    """Keras builds its optimizer without variables, as it does with its own."""
    loss = k.keras.losses.MeanSquaredError()
    for optimizer in (k.Optimizer(SAVED["config"]()), k.keras.optimizers.Adagrad()):
        model = new_model(k)
        model.compile(optimizer=optimizer, loss=loss)
        fit(model)
        model.save(tmp_path / "model.h5")
        loaded = k.keras.saving.load_model(tmp_path / "model.h5")
        assert type(loaded.optimizer) is type(optimizer)
        assert_equal(loaded.weights, model.weights)


EFFECTLESS = "clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "use_ema"
EFFECTLESS += ("gradient_accumulation_steps",)


@pytest.mark.parametrize("name", EFFECTLESS)
def test_a_setting_of_keras_without_effect_is_an_error(k, name):
    optimizer = k.Optimizer(optax.sgd(0.1))
    with pytest.raises(AttributeError, match=f"^{name} has no effect here"):
        setattr(optimizer, name, 2)
    setattr(optimizer, name, None)
    with pytest.raises(AttributeError, match="exclude_from_weight_decay has"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def of_two_parts():
    """A function that Keras can save by its name."""
    return optax.chain(optax.add_noise(0.01, 0.5, 0), optax.adam(0.01))


SAVED = {
    "config": lambda: gx.from_config(
        {
            "name": "accumulate",
            "inner": {"name": "optax.adamw", "learning_rate": 0.01},
            "num_required": 3,
        }
    ),
    "function": lambda: of_two_parts,
}


@pytest.mark.parametrize("name", SAVED)
def test_a_model_that_was_saved_goes_on(k, name, tmp_path):
    made = k.Optimizer(SAVED[name](), name="mine", loss_scale_factor=4.0)
    model, _ = train(k, made, epochs=1)
    model.save(tmp_path / "model.keras")
    known = {"of_two_parts": of_two_parts} if name == "function" else None
    loaded = k.keras.saving.load_model(tmp_path / "model.keras", known)
    assert (loaded.optimizer.name, loaded.optimizer.loss_scale_factor) == ("mine", 4.0)
    assert_equal(loaded.optimizer.variables, model.optimizer.variables)
    for each in (model, loaded):
        fit(each)
    assert_equal(loaded.weights, model.weights)
    assert_equal(loaded.optimizer.variables, model.optimizer.variables)


def with_a_rate():
    return optax.inject_hyperparams(gx.adagrad)(learning_rate=0.5)


# Another program: it makes the function anew, loads the model, and goes on.
LOADS = """
import sys
import gradxform as gx, keras, numpy as np, optax
import gradxform.keras

@keras.saving.register_keras_serializable(package="tests")
def with_a_rate():
    return optax.inject_hyperparams(gx.adagrad)(learning_rate=0.5)

model = keras.saving.load_model(sys.argv[1] + "/model.keras")
data = np.load(sys.argv[1] + "/data.npz")
model.fit(data["x"], data["y"], batch_size=8, shuffle=False, verbose=0)
rate = np.asarray(model.optimizer.learning_rate.value)
np.savez(sys.argv[1] + "/trained.npz", rate, *model.get_weights())
"""


def test_a_rate_that_was_set_is_saved_with_the_model(k, tmp_path):
    """A callback halves it, then it is set; Keras's own Adagrad is the oracle."""
    k.keras.saving.register_keras_serializable(package="tests")(with_a_rate)
    models = []
    for optimizer in (k.Optimizer(with_a_rate), k.keras.optimizers.Adagrad(0.5)):
        halve = k.keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
        model, history = train(k, optimizer, callbacks=[halve])
        assert history["learning_rate"] == [2**-2, 2**-3, 2**-4]
        model.optimizer.learning_rate = 2**-6
        models.append(model)
    model, of_keras = models
    model.save(tmp_path / "model.keras")
    loaded = k.keras.saving.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate) == 2**-6
    assert_equal(loaded.optimizer.variables, model.optimizer.variables)
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    run = [sys.executable, "-c", LOADS, str(tmp_path)]
    subprocess.run(run, check=True, env=os.environ | {"KERAS_BACKEND": "jax"})
    for each in (model, loaded, of_keras):
        fit(each)
    assert_equal(loaded.weights, model.weights)
    assert_close(model.weights, of_keras.weights)
    with np.load(tmp_path / "trained.npz") as trained:
        rate, *weights = trained.values()
    assert rate == 2**-6
    for ours, expected in zip(weights, values(model.weights), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


def test_a_transformation_without_a_config_cannot_be_saved(k, tmp_path):
    model, _ = train(k, k.Optimizer(optax.adam(0.01)), epochs=1)
    error = r"from_config.*register_keras_serializable"
    with pytest.raises(TypeError, match=error):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "of.weights.h5")
    # Keras would write some of these, and nobody could load them.
    for made in (
        lambda: optax.adam(0.01),
        functools.partial(optax.adam, 0.01),
        Makes().tx,
    ):
        with pytest.raises(TypeError, match=error):
            k.Optimizer(made).get_config()


class Makes:
    def tx(self):
        return optax.adam(0.01)


def test_weights_of_another_model_are_loaded_by_the_place_of_its_layers(k, tmp_path):
    """The names of layers differ there, and their alphabetical order does too."""

    def model_of(*names):
        layers = [k.keras.layers.Dense(4, name=name) for name in names]
        model = k.keras.Sequential([k.keras.Input((4,)), *layers])
        model.compile(optimizer=k.Optimizer(optax.adam(0.01)), loss="mse")
        return model

    first, second = model_of("dense_9", "dense_10"), model_of("dense_11", "dense_12")
    first.fit(X[:, :4], X[:, 4:], verbose=0)
    second.optimizer.build(second.trainable_variables)
    first.optimizer.save_own_variables(store := {})
    second.optimizer.load_own_variables(store)
    moments = [
        [v.value for v in model.optimizer.variables if re.search("mu.*kernel", v.path)]
        for model in (first, second)
    ]
    for a, b in zip(*moments, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(np.asarray(moments[0][0]) - moments[0][1]).max() > 0


def test_the_state_is_made_once(k, monkeypatch):
    """The variables are copies of it, and each copy frees its leaf."""
    layers = [k.keras.layers.Dense(256, use_bias=False) for _ in range(8)]
    params = k.keras.Sequential([k.keras.Input((256,)), *layers]).trainable_variables
    size, peaks = 8 * 256 * 256 * 4, []
    add_variable = k.Optimizer.add_variable

    def noted(self, *args, **kwargs):
        made = add_variable(self, *args, **kwargs)
        peaks.append(sum(x.nbytes for x in jax.live_arrays()))
        return made

    monkeypatch.setattr(k.Optimizer, "add_variable", noted)
    optimizer = k.Optimizer(optax.adam(0.01))
    before = sum(x.nbytes for x in jax.live_arrays())
    optimizer.build(params)
    after = sum(x.nbytes for x in jax.live_arrays())
    assert after - before == pytest.approx(2 * size, rel=0.01)  # mu and nu
    assert max(peaks) - after < 0.4 * size  # Two leaves of sixteen, each size / 8.


def compiled_step(optimizer):
    """The donated step of ``fit``, with a model of three layers, and its bytes."""
    import keras

    layers = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *layers])
    model.compile(optimizer=optimizer, loss="mse")
    batch = np.ones((8, 256), np.float32), np.ones((8, 256), np.float32)
    model.fit(*batch, verbose=0)
    of = model.trainable_variables, model.non_trainable_variables
    of += model.optimizer.variables, model.metrics_variables
    state = tuple([v.value for v in variables] for variables in of)
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile()
    return step.cost_analysis()["bytes accessed"], step.memory_analysis()


@pytest.mark.figures
@pytest.mark.parametrize(
    ("name", "clip"), [("Adam", {}), ("Adagrad", {"global_clipnorm": 1.0})]
)
def test_a_step_of_fit_costs_as_much_as_that_of_keras(k, name, clip):
    ours = gx.adagrad(1e-3, **clip) if clip else optax.adam(1e-3)
    moved, memory = compiled_step(k.Optimizer(ours))
    expected, limit = compiled_step(getattr(k.keras.optimizers, name)(**clip))
    assert moved <= 1.001 * expected
    assert memory.temp_size_in_bytes <= limit.temp_size_in_bytes + 1024
    assert memory.alias_size_in_bytes >= 0.99 * memory.output_size_in_bytes


def test_two_variables_of_one_path_are_trained(k):
    variables = [k.keras.Variable(np.float32(n), name="w") for n in range(3)]
    assert len({v.path for v in variables}) == 1
    optimizer = k.Optimizer(gx.adagrad(0.5, 0.0, eps=0.0))
    grads = [jnp.float32(g) for g in (1.0, 3.0, -2.0)]
    step = optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert int(step) == 1
    np.testing.assert_allclose([v.value for v in variables], [-0.5, 0.5, 2.5])


def test_state_that_is_a_parameter_is_copied(k):
    """Keras donates both, and one array must not be donated twice."""
    tx = optax.GradientTransformation(
        lambda params: params,  # The start, towards which the updates lead.
        lambda _, start, now: (jax.tree.map(jnp.subtract, start, now), start),
    )
    model = compiled(k, k.Optimizer(tx))
    start = values(model.weights)
    fit(model)
    assert_stayed(start, model.weights)
    train(k, k.Optimizer(optax.contrib.schedule_free_sgd(0.1)), epochs=1)


def test_the_loss_is_scaled_in_mixed_precision(k):
    k.keras.config.set_dtype_policy("mixed_float16")
    model, history = train(k, k.Optimizer(optax.adam(0.01)), epochs=5)
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    inner = model.optimizer.inner_optimizer
    assert {str(v.dtype) for v in inner.variables[1:]} <= {"float32", "int32"}
    # Of 40: a few had gradients that are not finite.
    assert int(inner.iterations) >= 35
    adam = k.keras.optimizers.Adam(0.01, epsilon=1e-8)
    _, expected = train(k, adam, epochs=5)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-2)


PARTS = jax.sharding.PartitionSpec(None, "model")


@pytest.mark.parametrize(
    ("tx", "parts"),
    [
        (gx.adagrad(0.01, row_wise=True), PARTS),
        # Some of its state is on one device, and has another rank than its kernel.
        (optax.adafactor(0.01), PARTS),
        (optax.adam(0.01), None),
    ],
)
def test_state_is_sharded_like_its_variables(k, tx, parts):
    """Over two axes of devices, or copied to all of them."""
    expected, _ = train(k, k.Optimizer(tx))
    distribution = k.keras.distribution
    mesh = distribution.DeviceMesh((2, 4), ("batch", "model"), jax.devices("cpu"))
    layouts = distribution.LayoutMap(mesh)
    layouts[".*hidden.*kernel"] = (None, "model")
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        if parts
        else distribution.DataParallel(devices=distribution.list_devices("cpu"))
    )
    model, _ = train(k, k.Optimizer(tx))
    assert_close(model.weights, expected.weights, rtol=1e-4, atol=1e-5)
    kernel, *_ = model.weights
    if parts:
        assert kernel.value.sharding.spec == parts
    of_kernel = [v for v in model.optimizer.variables if "hidden_kernel" in v.path]
    assert of_kernel
    for v in of_kernel:
        if v.shape == kernel.shape:
            assert v.value.sharding.is_equivalent_to(kernel.value.sharding, 2), v.path
    for v in model.optimizer.variables:
        assert len(v.value.sharding.device_set) == 8, v.path
        assert parts or v.value.sharding.is_fully_replicated


OF_TORCH = """
import sys, types
sys.modules["keras"] = types.SimpleNamespace(
    backend=types.SimpleNamespace(backend=lambda: "torch"))
import gradxform.keras
"""
ABSENT = "import sys; sys.modules['keras'] = None; import gradxform.keras"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (OF_TORCH, "Its backend is 'torch'"),
        (ABSENT, r"pip install 'gradxform\[keras\]'"),
    ],
)
def test_another_backend_is_an_error(program, error):
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", program]
    done = subprocess.run(
        run, env=os.environ | path, check=False, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(f"ImportError.*{error}", last)
    assert "KERAS_BACKEND=jax" in last


def test_the_example_of_the_docstring_runs(k):
    import doctest

    from gradxform.keras import _optimizer

    k.keras.utils.set_random_seed(0)
    assert doctest.testmod(_optimizer) == (0, 8)


def test_a_step_without_a_gradient_leaves_its_variable(k):
    a, b = (k.keras.Variable(np.ones(2, np.float32), name=n) for n in "ab")
    optimizer = k.Optimizer(optax.adam(0.1))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([jnp.ones(2), None], [a, b])
    assert np.all(np.asarray(a.value) < 1)
    np.testing.assert_array_equal(b.value, np.ones(2))


@pytest.mark.usefixtures("bounded", "cluster")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_recipe_on_ray_trains_a_table_that_no_worker_holds(k):
    section = test_frameworks.KERAS.partition("### On Ray, with a table")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    left = {"__name__": "__main__"}
    exec(code, left)
    assert left["run"].counts().accepted > 250
    (first, _), _, (loss, accuracy) = left["history"]
    assert loss < 0.3 < first
    assert accuracy > 0.97
    # What a worker does, this process has done for `history`.
    table, part = (1_000_000, 16), left["part"]
    assert part[0].dense_shape == table
    assert part[0].values.shape == (1024, 16)
    assert table not in {x.shape for x in jax.live_arrays()}
    if NEWEST_JAX:
        batch = left["words"], left["labels"]
        compiled = left["value_and_grad"].lower(part, *batch).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**20
