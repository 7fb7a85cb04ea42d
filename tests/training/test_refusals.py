"""Each refusal of a step, of rows and of wrappers fires, and says what is wrong."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx

W = jnp.ones((4, 3))
GRADS = gx.IndexedSlices([1, 3], jnp.ones((2, 3)), (4, 3))
SGD = optax.sgd(0.1)
STACK = {"w": jnp.ones((2, 3, 3)), "b": jnp.ones((2, 3))}


def apply(tx, grads=GRADS, params=W):
    return gx.apply_gradients(tx, grads, tx.init(params), params)


def by_row(update, init=lambda p: jax.tree.map(jnp.zeros_like, p)):
    """A step by the row, whose update is a function of gradients and state."""
    return apply(
        gx.lazy(optax.GradientTransformation(init, lambda g, s, p: update(g, s)))
    )


def only_four(p):
    """State that there is for one height alone; a second axis has it, too."""
    if len(p) != 4:
        raise ValueError
    return jnp.zeros((3, 4))


def shows_a_sum(g, s):
    jax.debug.callback(lambda x: None, jnp.cumsum(g, 0)[0])
    return g, s


def learned(p, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(w["w"] @ x + w["b"]), None), x, p)[
        0
    ].sum()


def by_layer(loss=learned, tx=SGD, layers=("w", "b"), **how):
    step = gx.minimize(loss, tx, layers=layers, **how)
    return step(STACK, tx.init(STACK), jnp.ones(3))


def called(g, s, p=None):
    return jax.tree.map(lambda x: io_callback(lambda x: x, x, x), g), s


def prints(p, x):
    def layer(x, w):
        y = io_callback(lambda x: x, x, x)
        return jnp.tanh(w["w"] @ y), None

    return jax.lax.scan(layer, x, p)[0].sum()


def halves(p, x):
    w = p["w"].reshape(3, 2, 3)
    return jax.lax.scan(lambda x, w: (x + w.sum(0), None), x, w)[0].sum()


def reads_table(p, tables, **how):
    step = gx.minimize(lambda p: p["w"] * p["t"][0].sum(), SGD, tables=tables, **how)
    return step(p, SGD.init(p))


ON_ONE = NamedSharding(jax.make_mesh((1,), ("x",), (AxisType.Auto,)), P())
TABLE = {"w": jnp.float32(1), "t": W}
# A call, then its error.
REFUSALS = r"""
gx.delayed(SGD, {})
  TypeError: num_steps must be an int, or a tree
gx.IndexedSlices([0], [1.0], ())
  ValueError: a table with 0 to 2\*\*31 - 1 rows, got \(\)
gx.IndexedSlices([0], [[1.0]], (2**31, 1))
  ValueError: a table with 0 to 2\*\*31 - 1 rows, got \(2147483648, 1\)
jnp.ones((3, 3)) + GRADS
  RowSparseError: row-sparse
jax.vmap(jax.random.bits)(jax.tree.leaves(GRADS)[1])
  TypeError: Row indices make no random numbers
jax.tree.unflatten(jax.tree.structure(GRADS), [jnp.arange(2), jnp.ones(2)])
  RowSparseError: row-sparse
gx.lookup(1.0, [0])
  ValueError: table must have at least one axis, got a scalar
reads_table(TABLE, ["t"], trainable={"w": True, "t": False})
  ValueError: tables names 't', which is not trainable
by_row(lambda g, s: (g, s), lambda p: jax.tree.map(only_four, p))
  RowSparseError: is another one for a table of any other number of rows
by_row(lambda g, s: (g, g[:, 0]), lambda p: jnp.zeros(()))
  RowSparseError: may mix rows, in its results
by_row(shows_a_sum)
  RowSparseError: may mix rows, by 'cumsum'
by_row(lambda g, s: (jax.lax.with_sharding_constraint(g, ON_ONE), s))
  RowSparseError: may mix rows, by 'sharding_constraint'
by_layer(tx=optax.GradientTransformation(SGD.init, lambda g, s, p: (g, g)))
  TypeError: its update returns a state of another structure
by_layer(tx=optax.GradientTransformation(SGD.init, called))
  TypeError: its update has an io_callback, one call for a layer
by_layer(layers=["W"])
  ValueError: layers must name leaves of params, .* got 'W'; there are 'w'
by_layer(lambda p, x: (x.sum(), p), layers=["w"], has_aux=True)
  ValueError: 'w' is one of layers, but the loss returns it
by_layer(lambda p, x: x.sum())
  ValueError: is one of layers, but no scan goes over it
by_layer(halves, layers=["w"])
  ValueError: 'w' is one of layers, but it is used by 'reshape'
by_layer(prints, layers=["w"])
  ValueError: has an io_callback, which would be called twice
gx.round_stochastically(0).init(jnp.arange(2))
  TypeError: takes parameters in bfloat16 and float16, .* got int32
gx.master_weights(SGD).init(jnp.ones(2, "float8_e4m3fn"))
  TypeError: takes parameters in bfloat16 and float16, .* got float8_e4m3fn
gx.get_master_weights(W, SGD.init(W))
  TypeError: state has no MasterWeightsState
gx.get_master_weights(jnp.ones(2), gx.master_weights(SGD).init(jnp.ones(2, "half")))
  TypeError: params have float32 at the root, .* in another precision
"""
LINES = REFUSALS.strip().splitlines()


@pytest.mark.every
@pytest.mark.parametrize(
    ("call", "error"), [*zip(LINES[::2], LINES[1::2], strict=True)]
)
def test_a_refusal(call, error):
    kind, _, message = error.strip().partition(": ")
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}") as info:
        eval(call)
    assert info.type.__name__ == kind


def test_a_table_may_have_as_many_rows_as_int32_can_count():
    g = gx.IndexedSlices([2**31 - 2], [[1.0]], (2**31 - 1, 1))
    assert g.shape == (2**31 - 1, 1)
