"""Every framework's embedding layer trains by the row, as docs/sparse.md shows.

The tests run the page's own code. They compare it with the same code without
``tables``, which has dense gradients.
"""

import pathlib
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import gradxform as gx

PAGE = (pathlib.Path(__file__).parents[1] / "docs/sparse.md").read_text()
BLOCK = r"```python\n(?!>>> )(.*?)```"
SHARED, _, *REST, _ = re.findall(BLOCK, PAGE, re.DOTALL)
BLOCKS = dict(re.findall(r"\n### (.+?)\n(?:[^#]*?)" + BLOCK, PAGE, re.DOTALL))
HEIGHT = 10_000

# The parameters that a block leaves; the table is among them.
LEFT = {
    "NNX's Embed": lambda left: nnx.to_pure_dict(nnx.state(left["model"], nnx.Param)),
    "Linen's Embed": lambda left: left["state"].params,
    "Equinox's Embedding": lambda left: left["params"],
    "Keras's Embedding": lambda left: left["params"],
}


@pytest.fixture(params=LEFT)
def name(request, monkeypatch):
    if request.param.startswith("Keras"):
        monkeypatch.setenv("KERAS_BACKEND", "jax")  # The block sets it for good.
        request.getfixturevalue("standard_promotion")  # Its layers broadcast ranks.
    return request.param


def batches(n):
    """Of few words, so that most rows are not touched."""
    rng = np.random.default_rng(0)
    for _ in range(n):
        words = rng.integers(0, 50, (8, 4)).astype(np.int32)
        yield words * 7, rng.standard_normal(8).astype(np.float32)


def run(name, n, tables=True, height=HEIGHT):
    """What a block leaves after some batches, and its parameters."""
    code = SHARED + BLOCKS[name].replace("10_000", str(height))
    if not tables:
        code, named = re.subn(r"tables=\[.*?\]", "tables=()", code)
        assert named == 1
    left = {"batches": batches(n)}
    exec(code, left)
    return left, LEFT[name](left)


def table_of(params):
    (table,) = (x for x in jax.tree.leaves(params) if x.shape[0] == HEIGHT)
    return np.asarray(table)


def test_every_block_has_a_test():
    assert list(BLOCKS) == list(LEFT)
    assert list(BLOCKS.values()) == REST


@pytest.mark.slow
def test_trains_as_with_dense_gradients(name):
    _, start = run(name, 0)
    before = table_of(start)
    _, params = run(name, 5)
    _, expected = run(name, 5, tables=False)
    chex.assert_trees_all_close(
        *map(jax.tree.leaves, (params, expected)), rtol=1e-6, atol=1e-6
    )
    touched = np.unique([words for words, _ in batches(5)])
    rest = np.setdiff1d(np.arange(HEIGHT), touched)
    assert np.all(np.any(table_of(params)[touched] != before[touched], axis=1))
    np.testing.assert_array_equal(table_of(params)[rest], before[rest])


@pytest.mark.slow
def test_nnx_keeps_the_state_of_its_layers():
    """As under ``nnx.value_and_grad``, which carries the state of layers by itself."""
    left, _ = run("NNX's Embed", 3)
    again, _ = run("NNX's Embed", 0)
    model, optimizer = again["model"], again["optimizer"]
    for words, labels in batches(3):
        grads = nnx.grad(lambda m, *b: left["mse"](m(b[0]), b[1]))(model, words, labels)
        optimizer.update(model, grads)
    kept, expected = (
        nnx.to_pure_dict(nnx.state(trained, nnx.Not(nnx.Param)))
        for trained in (left["model"], model)
    )
    assert np.all(kept["norm"]["mean"] != 0)
    assert kept["dropout"]["rngs"]["count"] == 3
    expected["dropout"]["rngs"].pop("key")
    kept["dropout"]["rngs"].pop("key")
    chex.assert_trees_all_close(kept, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_gx_apply_updates_takes_the_place_of_equinoxs():
    layer = eqx.nn.MLP(5, 2, 3, 1, key=jax.random.key(0))
    updates = eqx.filter(jax.tree.map(lambda _: None, layer), False)
    rows = gx.IndexedSlices([1, 1], jnp.ones((2, 5)), (3, 5))
    updates = eqx.tree_at(
        lambda m: m.layers[0].weight, updates, rows, is_leaf=lambda x: x is None
    )
    with pytest.raises(ValueError, match="IndexedSlices"):
        eqx.apply_updates(layer, updates)
    after = gx.apply_updates(layer, updates)
    moved = after.layers[0].weight - layer.layers[0].weight
    np.testing.assert_allclose(moved, [[0] * 5, [2] * 5, [0] * 5], atol=1e-6)
    assert after.activation is layer.activation
    # Equinox gets the same from the dense gradient.
    dense = eqx.tree_at(lambda m: m.layers[0].weight, updates, rows.densify())
    assert eqx.tree_equal(eqx.apply_updates(layer, dense), after)


def temporaries(name, tables, height):
    left, _ = run(name, 1, tables, height)
    words, labels = next(batches(1))
    if "optimizer" in left:
        # NNX's jit hides what it compiles.
        model, optimizer = left["model"], left["optimizer"]
        graph, state = nnx.split((model, optimizer))

        def step(state, words, labels):
            model, optimizer = nnx.merge(graph, state)
            left["step"].__wrapped__(model, optimizer, words, labels)
            return nnx.state((model, optimizer))

        lowered = jax.jit(step, donate_argnums=0).lower(state, words, labels)
    elif name.startswith("Linen"):
        lowered = left["step"].lower(left["state"], words, labels)
    else:
        lowered = left["step"].lower(left["params"], left["state"], words, labels)
    stats = lowered.compile().memory_analysis()
    return stats.temp_size_in_bytes


@pytest.mark.figures
@pytest.mark.slow
def test_no_step_makes_anything_of_the_tables_size(name):
    assert temporaries(name, True, 100_000) == temporaries(name, True, HEIGHT)
    if name == "Linen's Embed":  # So that the measure is known to see a table.
        assert temporaries(name, False, HEIGHT) > HEIGHT * 16 * 4


IDS = jnp.array([3, 0, 3])


def nnxs_checkpoint(height):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(height, 16, rngs=rngs)
            self.layers = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(3))

        def __call__(self, ids):
            rows = self.embed(ids)
            for layer in self.layers:
                rows = jnp.sin(layer(rows))
            return jnp.sum(rows)

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss(params, ids):
        call = nnx.remat(lambda model, ids: model(ids))
        return call(nnx.merge(graph, params), ids)

    return loss, params


def linens_checkpoint(height):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            rows = linen.Embed(height, 16)(ids)
            for _ in range(3):
                rows = jnp.sin(linen.Dense(16)(rows))
            return jnp.sum(rows)

    model = linen.remat(Model)()
    return model.apply, model.init(jax.random.key(0), IDS)


def haikus_checkpoint(height):
    import haiku as hk

    def model(ids):
        rows = hk.Embed(height, 16)(ids)
        for _ in range(3):
            rows = jnp.sin(hk.Linear(16)(rows))
        return jnp.sum(rows)

    def again(ids):
        return hk.remat(model)(ids)

    whole = hk.without_apply_rng(hk.transform(again))
    return whole.apply, whole.init(jax.random.key(0), IDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [nnxs_checkpoint, linens_checkpoint, haikus_checkpoint]
)
def test_a_whole_model_may_be_computed_again_in_the_backward_pass(make):
    loss, params = make(50)
    paths = jax.tree.leaves_with_path(params)
    is_table = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape[0] == 50
        for path, x in paths
    }
    sparse = jax.jit(gx.value_and_grad(loss, tables=is_table.get))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 50, 1000), jnp.int32)
    value, grads = sparse(params, ids)
    expected_value, expected = jax.jit(jax.value_and_grad(loss))(params, ids)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    leaves = jax.tree.leaves(grads, is_leaf=lambda x: isinstance(x, gx.IndexedSlices))
    tables = [g for g in leaves if isinstance(g, gx.IndexedSlices)]
    assert [g.indices.tolist() for g in tables] == [ids.tolist()]
    dense = [g.densify() if isinstance(g, gx.IndexedSlices) else g for g in leaves]
    chex.assert_trees_all_close(dense, jax.tree.leaves(expected), rtol=1e-4, atol=1e-4)
    assert "remat2" in str(sparse.trace(params, ids).jaxpr)


@pytest.mark.slow
def test_a_vmap_of_nnxs_layers_is_refused():
    make = nnx.vmap(lambda rngs: nnx.Embed(5, 2, rngs=rngs))
    graph, params = nnx.split(make(nnx.Rngs(0).split(3)), nnx.Param)

    def loss(params):
        read = nnx.vmap(lambda layer, ids: layer(ids), in_axes=(0, None))
        return jnp.sum(read(nnx.merge(graph, params), IDS) ** 2)

    with pytest.raises(TypeError, match=r"'embedding.*used by 'gather'"):
        gx.value_and_grad(loss, tables=lambda _: True)(params)


@pytest.mark.slow
def test_a_tied_table_is_refused_and_is_dense_where_it_is_not_named():
    layer = linen.Embed(5, 2)
    params = layer.init(jax.random.key(0), IDS)

    def loss(params):
        rows = layer.apply(params, IDS)
        return jnp.sum(layer.apply(params, rows, method=layer.attend))

    with pytest.raises(TypeError, match=r"used by 'transpose' .*leave .* out of table"):
        gx.value_and_grad(loss, tables=lambda _: True)(params)
    _, grads = gx.value_and_grad(loss)(params)
    (table,), (grad,) = map(jax.tree.leaves, (params, grads))
    table = np.asarray(table, np.float64)
    # The gradient of the sum of rows[ids] · tableᵀ: each row of the table gets the sum
    # of all rows that were read. A row that was read also gets the sum of the whole
    # table, once for each time.
    expected = np.tile(table[IDS].sum(0), (5, 1))
    np.add.at(expected, np.asarray(IDS), table.sum(0))
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)
