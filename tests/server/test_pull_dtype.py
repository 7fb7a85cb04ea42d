"""Parameters that are pulled in a dtype of their own; ``test_group`` has processes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests.engines.jobs import ended, fails, make_job, worker

PARAMS = {
    "table": np.linspace(-3, 3, 21, dtype=np.float32).reshape(7, 3),
    "half": jnp.array([0.1, 0.2], jnp.bfloat16),
    "count": np.int32(5),
    "z": np.complex64(1 + 2j),
}
OWN = {"table": jnp.float32, "half": jnp.bfloat16}


@pytest.fixture(params=["local", "committed"])
def server(request):
    params = PARAMS
    if request.param == "committed":
        params = jax.device_put(PARAMS, jax.devices()[1])
    with gx.ParameterServer(params, optax.set_to_zero()) as server:
        yield server


@pytest.mark.every
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, jnp.float32, np.float32])
def test_floating_leaves_are_cast_and_all_others_stay(server, dtype):
    pulled, step = server.pull(dtype=dtype)
    assert step == 0
    for name in OWN:
        assert pulled[name].dtype == dtype
        expected = np.asarray(PARAMS[name]).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(pulled[name], expected)
    for name in ("count", "z"):
        assert pulled[name].dtype == PARAMS[name].dtype
        np.testing.assert_array_equal(pulled[name], PARAMS[name])
    own, _ = server.pull()
    assert {name: own[name].dtype for name in OWN} == OWN
    assert {x.sharding for x in pulled.values()} == {x.sharding for x in own.values()}
    assert pulled["table"].committed == own["table"].committed


def test_rows_are_cast_too(server):
    ids = np.array([[6, 2], [2, 0]])
    pulled, _ = server.pull({"table": ids}, jnp.bfloat16)
    table = pulled["table"]
    assert isinstance(table, gx.TableRows)
    assert table.values.dtype == pulled["half"].dtype == jnp.bfloat16
    rows = gx.lookup(table, jnp.asarray(ids))
    np.testing.assert_array_equal(rows, PARAMS["table"].astype(jnp.bfloat16)[ids])


def test_no_other_dtype_is_taken(server):
    for dtype in (jnp.int32, "int8", bool, jnp.complex64, object, "no such", 3, float):
        with pytest.raises(TypeError, match=r"^dtype"):
            server.pull(dtype=dtype)
    assert server.pull()[1] == 0


def test_a_pulled_copy_is_the_callers_own(server):
    pulled = [server.pull(dtype=jnp.float32)[0]["table"] for _ in range(2)]
    pulled[0].delete()
    np.testing.assert_array_equal(pulled[1], PARAMS["table"])
    np.testing.assert_array_equal(server.pull()[0]["table"], PARAMS["table"])


def test_each_leaf_is_compiled_once_for_each_dtype(server, monkeypatch):
    compiled, compile = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda *args, **options: compiled.append(1) or compile(*args, **options),
    )
    for dtype, programs in [
        (jnp.float16, 2),
        (jnp.float16, 2),
        (jnp.float32, 3),  # `half` alone: the table has that dtype.
        (None, 3),
    ]:
        server.pull(dtype=dtype)
        assert len(compiled) == programs


# Workers.


def half(w, x):
    assert w.dtype == jnp.bfloat16
    return jnp.mean(jnp.square(w - x))


def in_pieces(w, x):
    yield
    return jax.value_and_grad(half)(w, x)


@pytest.mark.parametrize(
    ("engine", "gradient", "as_function"),
    [
        (engines.simulated, jax.value_and_grad(half), True),
        (engines.threads, in_pieces, False),
    ],
)
def test_gradients_come_back_in_the_dtypes_of_the_parameters(
    engine, gradient, as_function
):
    x, params = jnp.ones(3, jnp.bfloat16), jnp.array([0.3, 0.7, -2.1])
    halves = worker(gradient, lambda _: (x,), pull_dtype=jnp.bfloat16)
    job = make_job([halves], 3, gx.drop_stale(optax.sgd(0.5), 0))
    given = (lambda: params) if as_function else params
    pushes, state, _ = ended(engine, job._replace(params=given))
    assert [push.number for push in pushes] == [0, 1, 2]
    got = state["params"]
    expected = np.array([0.3, 0.7, -2.1], np.float32)
    for _ in range(3):  # The gradient is that of the rounded weights.
        rounded = expected.astype(jnp.bfloat16)
        grad = np.asarray(jax.grad(half)(jnp.asarray(rounded), x))
        expected = expected - np.float32(0.5) * grad.astype(np.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)


def test_a_gradient_that_does_not_fit_is_named():
    def gradient(params):
        return jnp.float32(0), {"w": jnp.ones(3, jnp.bfloat16)}

    halves = worker(gradient, pull_dtype=jnp.bfloat16)
    job = make_job([halves], 1, optax.sgd(0.5), params={"w": jnp.ones(2)})
    match = r"grads and params differ at \['w'\]"
    fails(engines.simulated, job, TypeError, match)
