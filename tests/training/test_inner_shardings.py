"""A ``jit`` inside of a program keeps its shardings, whoever goes into it.

On four devices each multiplies a quarter of the rows. The numbers would be the same if
each multiplied all of them, so these tests count products.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.training.losses import OLD

LAYERS, ROWS, WIDTH = 3, 16, 8
MEMORIES = ["device"] if OLD else ["device", "host"]


def mesh_of(kind):
    return jax.make_mesh((4,), ("d",), (kind,), devices=jax.devices()[:4])


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def losses(mesh):
    """What enters the inner ``jit``: the batch, a stack, a stack in a checkpoint."""
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    cut = jax.jit(lambda x: x, out_shardings=rows)
    inside = jax.jit(scanned, in_shardings=(whole, rows), out_shardings=rows)
    nested = jax.jit(inside, out_shardings=rows)
    return {
        "the batch": lambda p, x: jnp.sum(scanned(p["w"], cut(x)) ** 2),
        "a stack": lambda p, x: jnp.sum(inside(p["w"], x) ** 2),
        "a checkpoint": lambda p, x: jnp.sum(jax.checkpoint(nested)(p["w"], x) ** 2),
    }


def products(text, rows):
    """Products of so many rows and a matrix."""
    return text.count(f"f32[{rows},{WIDTH}]{{1,0}} dot(")


def arrays(mesh):
    w = 0.3 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    return {"w": jax.device_put(w, NamedSharding(mesh, P()))}, jnp.ones((ROWS, WIDTH))


@pytest.mark.every
@pytest.mark.parametrize("name", losses(mesh_of(AxisType.Auto)))
def test_a_loss_by_layers(name):
    mesh = mesh_of(AxisType.Auto)
    loss, (params, x), tx = losses(mesh)[name], arrays(mesh), optax.sgd(0.1)
    step = gx.minimize(loss, tx, layers=["w"], donate=False)
    text = step.lower(params, tx.init(params), x).compile().as_text()
    assert products(text, ROWS // 4) >= 2  # Forward, and again in the backward pass.
    assert products(text, ROWS) == 0
    new, _, value = step(params, tx.init(params), x)
    wanted, gradient = jax.jit(jax.value_and_grad(loss))(params, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(
        new["w"], params["w"] - 0.1 * gradient["w"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", losses(mesh_of(AxisType.Auto)))
def test_an_evaluation(name):
    mesh = mesh_of(AxisType.Auto)
    loss, (params, x) = losses(mesh)[name], arrays(mesh)
    evaluated = gx.evaluate(loss, layers=["w"])
    text = evaluated.lower(params, x).compile().as_text()
    assert products(text, ROWS // 4) == 1
    assert products(text, ROWS) == 0


def test_rows_of_a_table():
    mesh = mesh_of(AxisType.Auto)
    rows = NamedSharding(mesh, P("d"))

    def read(table, w, ids):
        return jnp.tanh(table[ids] @ w)

    inside = jax.jit(read, in_shardings=(None, None, rows), out_shardings=rows)
    params = {"emb": jnp.ones((5, WIDTH)), "w": jnp.ones((WIDTH, WIDTH))}
    ids = jnp.arange(ROWS) % 5
    gradient = gx.value_and_grad(
        lambda p, ids: jnp.sum(inside(p["emb"], p["w"], ids)), tables=["emb"]
    )
    text = jax.jit(gradient).lower(params, ids).compile().as_text()
    assert products(text, ROWS // 4) >= 1
    assert products(text, ROWS) == 0


@pytest.mark.parametrize("cut", [P("d"), P(None, "d"), P(None, None, "d")])
def test_an_update_of_layers(cut):
    """The sharding is that of the whole stack: a layer has no axis of layers to cut."""
    mesh = mesh_of(AxisType.Auto)
    there = NamedSharding(mesh, cut)
    halved = jax.jit(lambda g: g @ g / 2, in_shardings=there, out_shardings=there)
    tx = optax.stateless(lambda u, _: {"w": -0.1 * halved(u["w"])})
    w = 0.3 * jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH))
    params, x = {"w": w}, jnp.ones((2, WIDTH))

    def loss(p, x):
        return jnp.sum(scanned(p["w"], x) ** 2)

    step = gx.minimize(loss, tx, layers=["w"], donate=False)
    text = step.lower(params, tx.init(params), x).compile().as_text()
    lines, columns = (WIDTH // 4 if cut[a : a + 1] == ("d",) else WIDTH for a in (1, 2))
    assert re.search(rf"f32\[(1,)?{lines},{columns}\]", text)
    if cut == P("d"):
        assert not re.search(r" (all|collective)-\w+(-start)?\(", text)
    new, _, _ = step(params, tx.init(params), x)
    g = np.asarray(jax.grad(loss)(params, x)["w"], np.float64)
    np.testing.assert_allclose(new["w"], w - 0.05 * g @ g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", MEMORIES)
def test_explicit_axes(memory):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, x = arrays(mesh)
        if memory == "host":
            params = gx.on_host(params, min_size=1)
        x, tx = jax.device_put(x, NamedSharding(mesh, P())), optax.sgd(0.1)
        for name, loss in losses(mesh).items():
            step = gx.minimize(loss, tx, layers=["w"], donate=False)
            text = step.lower(params, tx.init(params), x).compile().as_text()
            assert products(text, ROWS) == 0, name
