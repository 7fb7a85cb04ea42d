"""``gradxform.keras.Optimizer`` on variables alone, against NumPy.

Training by ``fit`` is in `test_keras_fit`, which is slow. Here nothing is compiled.
"""

import importlib
import sys
import types

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")


@pytest.fixture
def keras(monkeypatch, standard_promotion):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    return pytest.importorskip("keras")


def make(tx, **options):
    from gradxform.keras import Optimizer

    return Optimizer(tx, **options)


def momentum(rate=0.5):
    return optax.sgd(rate, momentum=0.5)


def variables(keras):
    """Two have one name, as layers may give it."""
    return [
        keras.Variable(np.full(2, x, np.float32), name=name)
        for x, name in ((1.0, "a"), (2.0, "b"), (3.0, "a"))
    ]


def values(of):
    return [np.asarray(x.value).tolist() for x in of]


def test_steps_are_those_of_numpy(keras):
    given, gradient = variables(keras), jnp.ones(2)
    optimizer = make(gx.drop_stale(optax.inject_hyperparams(momentum)(rate=0.5), 0))
    optimizer.build(given)
    optimizer.build([])  # It is built.
    optimizer.apply([gradient, gradient, 3 * gradient])
    assert values(given) == [[0.5] * 2, [1.5] * 2, [1.5] * 2]
    # What has no gradient stays.
    optimizer.apply([gradient, 2 * gradient], [given[2], given[0]])
    assert values(given) == [[-0.75] * 2, [1.5] * 2, [0.25] * 2]
    assert int(optimizer.iterations.value) == 2
    assert optimizer.variables[0] is optimizer.iterations
    assert len(optimizer.variables) == 1 + len(optimizer._leaves)
    (steps,) = [x for x in optimizer.variables if "global_step" in x.path]
    assert int(steps.value) == 2
    assert [x.path for x in optimizer.variables if "trace" in x.path][-1].endswith(
        "a_2"
    )


def test_a_rate_is_read_and_set_before_and_after_it_is_built(keras):
    given = variables(keras)

    def rated(learning_rate):
        return optax.sgd(learning_rate)

    optimizer = make(optax.inject_hyperparams(rated)(learning_rate=0.25))
    assert float(optimizer.learning_rate.value) == 0.25
    optimizer.learning_rate = 0.5
    optimizer.build(given)
    assert float(optimizer.learning_rate.value) == 0.5
    optimizer.apply([jnp.ones(2)] * 3)
    assert values(given) == [[0.5] * 2, [1.5] * 2, [2.5] * 2]
    optimizer.learning_rate = 1.0
    optimizer.apply([jnp.ones(2)] * 3)
    assert values(given) == [[-0.5] * 2, [0.5] * 2, [1.5] * 2]
    with pytest.raises(TypeError, match="learning_rate must be a number"):
        optimizer.learning_rate = lambda step: 0.1
    scheduled = make(optax.inject_hyperparams(rated)(learning_rate=lambda step: 0.1))
    with pytest.raises(AttributeError, match="comes from a schedule"):
        scheduled.learning_rate = 0.1
    with pytest.raises(AttributeError, match="holds 0 learning rates"):
        _ = make(momentum()).learning_rate


def test_two_rates_are_one_too_many_and_a_rate_of_another_name_is_none(keras):
    def rated(learning_rate):
        return optax.sgd(learning_rate)

    one = optax.inject_hyperparams(rated)(learning_rate=0.25)
    two = make(optax.chain(one, one))
    other = make(optax.inject_hyperparams(momentum)(rate=0.25))
    for optimizer, count in ((two, 2), (other, 0)):
        for _ in range(2):
            with pytest.raises(
                AttributeError, match=f"^the optimizer's .* {count} lea"
            ):
                _ = optimizer.learning_rate
            optimizer.build(variables(keras))


def test_no_gradient_is_late_for_gates_side_by_side(keras):
    """One has made a step with the first gradient, and the other has not."""
    gates = {
        "a": gx.conditional_accumulator(optax.sgd(1.0), 2),
        "b": gx.drop_stale(optax.sgd(1.0), 0),
    }
    tx = optax.partition(
        gates, lambda params: type(params)(zip(params, "aba", strict=True))
    )
    given, optimizer = variables(keras), make(tx)
    for _ in range(2):
        optimizer.apply([jnp.ones(2)] * 3, given)
    assert values(given) == [[0.0] * 2, [0.0] * 2, [2.0] * 2]


def test_a_sparse_gradient_of_jax_is_made_dense(keras):
    given, optimizer = variables(keras)[:2], make(momentum())
    sparse = jax.experimental.sparse.BCOO((jnp.ones(1), jnp.array([[1]])), shape=(2,))
    optimizer.apply([sparse, jnp.ones(2)], given)
    assert values(given) == [[1.0, 0.5], [1.5] * 2]


def test_each_leaf_of_the_state_is_a_variable_with_a_copy(keras):
    """Keras donates parameters and state: one array must not be donated twice."""
    start = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params: (updates, state)
    )
    given, optimizer = variables(keras)[:2], make(start)
    optimizer.build(given)
    kept = optimizer.variables[1:]
    assert [x.name for x in kept] == ["a", "b"]
    assert values(kept) == values(given)
    pointers = {x.value.unsafe_buffer_pointer() for x in [*kept, *given]}
    assert len(pointers) == 4
    number = optax.GradientTransformation(
        lambda _: jnp.float32(2.0), lambda updates, state, params: (updates, state + 1)
    )
    optimizer = make(number)
    optimizer.apply([jnp.ones(2)] * 2, given)
    (kept,) = optimizer.variables[1:]
    assert (kept.name, float(kept.value)) == ("state", 3.0)


def test_a_leaf_lies_like_its_parameter_and_others_on_all_devices(keras):
    from gradxform.keras import _optimizer

    layout, distribution = _optimizer._layout, keras.distribution
    assert layout(jnp.ones(2)) is None
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    cut = jax.device_put(jnp.ones((2, 3)), sharding)
    assert layout(cut) is sharding
    devices = distribution.list_devices("cpu")
    distribution.set_distribution(distribution.DataParallel(devices=devices))
    try:
        found = layout(jnp.ones((2, 3)))
        assert found.axes == (None, None)
        assert found.device_mesh.devices.size == len(devices)
        assert layout(cut) is sharding
    finally:
        distribution.set_distribution(None)


@pytest.mark.every
@pytest.mark.parametrize("backend", ["torch", None])
def test_another_backend_or_no_keras_is_an_error(backend, monkeypatch):
    of = types.SimpleNamespace(backend=lambda: backend)
    found = backend and types.SimpleNamespace(backend=of)
    monkeypatch.setitem(sys.modules, "keras", found)
    for name in ("gradxform.keras", "gradxform.keras._optimizer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"JAX backend: run python -m pip") as raised:
        importlib.import_module("gradxform.keras")
    ends = "Its backend is 'torch'." if backend else "first import of keras."
    assert str(raised.value).endswith(ends)


def test_random_keys_of_a_state_go_on(keras):
    given = variables(keras)
    key = jax.random.key(3, impl="rbg")  # It is no key without its kind.
    noise = optax.add_noise(1.0, 0.0, key)
    optimizer = make(noise)
    optimizer.build(given)
    (keys,) = [x for x in optimizer._leaves.values() if x.key is not None]
    first = np.asarray(keys.variable.value)
    assert (first == np.asarray(jax.random.key_data(key))).all()
    optimizer.apply([jnp.ones(2)] * 3)
    params = {str(i): jnp.ones(2) for i in range(3)}
    _, after = noise.update(params, noise.init(params))
    expected = jax.random.key_data(after.rng_key)
    assert (np.asarray(keys.variable.value) == np.asarray(expected)).all()


def test_what_is_a_part_of_the_transformation_is_refused(keras):
    optimizer = make(momentum())
    for name in ("clipnorm", "weight_decay", "use_ema"):
        with pytest.raises(AttributeError, match=f"^{name} has no effect here"):
            setattr(optimizer, name, 0.1)
        setattr(optimizer, name, None)
    with pytest.raises(AttributeError, match=r"^exclude_from_weight_decay has no"):
        optimizer.exclude_from_weight_decay(["a"])
    with pytest.raises(TypeError, match="tx must be a GradientTransformation"):
        make(3)
    scaled = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda updates, state, params=None, *, value: (updates, ())
    )
    with pytest.raises(TypeError, match=r"With these alone its update fails.*value"):
        make(scaled).build(variables(keras))
    make(scaled).build([])  # It makes no step.


def registered():
    return momentum(1.0)


def test_a_config_makes_the_same_optimizer(keras):
    function = keras.saving.register_keras_serializable("of a test")(registered)
    adagrad = gx.from_config({"name": "adagrad", "learning_rate": 0.5})
    for tx in (function, adagrad):
        optimizer = make(tx, loss_scale_factor=4.0, name="mine")
        config = optimizer.get_config()
        assert (config["loss_scale_factor"], config["name"]) == (4.0, "mine")
        again = type(optimizer).from_config(config)
        assert again.get_config() == config
        assert (again.loss_scale_factor, again.name) == (4.0, "mine")
        of_both = []
        for each in (optimizer, again):
            given = variables(keras)
            each.apply([jnp.full(2, 4.0)] * 3, given)
            of_both.append(values(given))
        assert of_both[0] == of_both[1]
        if tx is function:
            assert of_both[0] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    for tx in (momentum(), lambda: optax.sgd(0.5)):
        with pytest.raises(TypeError, match="Keras cannot save this optimizer"):
            make(tx).get_config()
