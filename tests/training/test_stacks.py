"""Variables that are made of a stack: where layers lie in it, and how one is read."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._layers.stacks import StackVariable
from tests import in_numpy

W = np.arange(4.0 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
MESH = NamedSharding(jax.make_mesh((1,), ("x",), (AxisType.Auto,)), P())
# The variable, the axis of the stack that has its layers, and the order of its axes.
CASES = {
    "w": (lambda w: w, 0, ()),
    "turned": (lambda w: w.transpose(1, 2, 0), 1, (1, 2, 0)),
    "turned twice": (lambda w: w.transpose(1, 2, 0).transpose(1, 0, 2), 2, (2, 1, 0)),
    "turned back": (lambda w: w.transpose(1, 2, 0).transpose(2, 0, 1), 0, (0, 1, 2)),
    "placed": (lambda w: jax.lax.with_sharding_constraint(w, MESH), 0, (0, 1, 2)),
    "placed and turned": (
        lambda w: jax.lax.with_sharding_constraint(w.transpose(2, 0, 1), MESH),
        *(2, (2, 0, 1)),
    ),
    "scaled": (lambda w: (0.5 * w + 1).transpose(1, 0, 2), 1, None),
    "groups": (lambda w: w.reshape(2, 2, 6, 5), 0, None),
    "groups of another axis": (lambda w: w.transpose(1, 0, 2).reshape(3, -1), 1, None),
    "mixed": (lambda w: w.transpose(1, 0, 2).reshape(4, 6, 5), None, None),
    "integers": (lambda w: w.astype(int), 0, None),
    "from integers": (lambda w: w.astype(int).astype(np.float32), 0, None),
    "stopped": (jax.lax.stop_gradient, 0, None),
}


def made(f):
    variable = StackVariable(0, "w")
    for eqn in jax.make_jaxpr(f)(W).jaxpr.eqns:
        variable = variable.then(eqn)
    return variable


@pytest.mark.every
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_that_of_the_whole_variable(name):
    f, axis, order = CASES[name]
    variable, whole = made(f), in_numpy.jit(f)(W)
    assert (variable.axis(len(whole)), variable.order) == (axis, order)
    assert variable.is_itself == (order in ((), (0, 1, 2)))
    assert variable.has_derivative == (
        name not in ("integers", "from integers", "stopped")
    )
    np.testing.assert_array_equal(in_numpy.jit(variable.whole)(W), whole)
    assert variable.axis(0) is None
    assert name == "w" or variable.axis(7) is None
    if axis is None:
        return
    for layer, part in zip(whole, np.split(W, len(whole), axis), strict=True):
        got = in_numpy.jit(lambda part: variable.layer(part, len(whole)))(part)
        np.testing.assert_array_equal(got, layer)
        if order is not None:
            np.testing.assert_array_equal(in_numpy.jit(variable.part)(layer), part)


def test_a_refusal_says_what_to_do():
    with pytest.raises(ValueError) as error:  # noqa: PT011
        StackVariable(3, "blocks/w").refuse("nobody knows it")
    assert str(error.value) == (
        "'blocks/w' is one of layers, but nobody knows it. A jax.lax.scan of the loss "
        "must go over it, and nothing else that has a derivative may read it. Read "
        "each layer inside of the scan, or leave 'blocks/w' out of layers."
    )
