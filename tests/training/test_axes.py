"""Axes of slices in drawn programs: in another order slices give the same ones."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradxform._jax import programs
from gradxform._matrices.axes import Followed, MixedError
from tests.in_numpy import Program

LENGTH = 3  # No other axis has this length, or a multiple of it.
ORDER = [2, 0, 1]
X = np.random.default_rng(0).standard_normal((4, LENGTH, 5)).astype(np.float32)
KINDS = "scale", "transpose", "product", "sum", "scan", "slices", "cond", "barrier"


def accumulated(x):
    """Over its first axis."""
    last, all_ = lax.scan(lambda c, x: (c + x, c * x), jnp.zeros(x.shape[1:]), x)
    return all_ + last[None] * jnp.ones_like(all_)


def drawn(rng, depth):
    """A function that keeps apart the slices along an axis of its argument."""
    kind = rng.choice(KINDS)
    f = drawn(rng, depth - 1) if depth else lambda x: x

    def other(x):
        """Another axis."""
        return next(k for k, n in enumerate(x.shape) if n != LENGTH)

    def front(x, axis):
        return x.transpose(axis, *(k for k in range(x.ndim) if k != axis))

    def moved(x):
        axis = other(x)
        if kind == "scale":
            return 2 * x
        if kind == "transpose":
            return x.transpose(rng.sample(range(x.ndim), x.ndim))
        if kind == "product":
            weights = jnp.ones((x.shape[axis], 7)) * jnp.arange(7.0)[None]
            return lax.dot_general(x, weights, (((axis,), (0,)), ((), ())))
        if kind == "sum":
            return jnp.sum(x, axis, keepdims=x.ndim < 3)
        if kind == "scan":
            return accumulated(front(x, axis))
        if kind == "slices":
            return lax.map(
                lambda x: jnp.sin(x) if x.ndim else x, front(x, x.shape.index(LENGTH))
            )
        if kind == "barrier":
            return lax.optimization_barrier((x, 1.0))[0]
        return lax.cond(jnp.array(True), lambda x: x + 1, lambda x: 2 * x, x)

    return lambda x: f(moved(x))


@pytest.mark.every
@pytest.mark.parametrize("is_back", [False, True])
def test_slices_lie_along_the_axis_that_is_found(is_back):
    for seed in range(30):
        closed = jax.make_jaxpr(drawn(random.Random(seed), 4))(X)
        jaxpr, program = closed.jaxpr, Program(closed)
        program(X)
        before = program.values
        program(X[:, ORDER])
        (lead,) = jaxpr.outvars if is_back else jaxpr.invars
        followed = Followed(lead, lead.aval.shape.index(LENGTH))
        followed.follow(jaxpr.eqns, range(len(jaxpr.eqns)))
        found = followed.along()
        assert found[jaxpr.invars[0]] == (1, 1), seed
        for x, (after,) in program.values.items():
            (value,) = before[x]
            if x in found:
                value = value.take(ORDER, found[x].axis)
            np.testing.assert_array_equal(value, after, err_msg=f"{seed}")


def test_what_mixes_slices_is_named_or_refused():
    def f(x):
        twice = 2 * x
        total = jnp.sum(twice, 1)
        return 3 * twice, 3 * total

    closed = jax.make_jaxpr(f)(X)
    (x,), eqns = closed.jaxpr.invars, closed.jaxpr.eqns
    followed = Followed(x, 1)
    followed.follow(eqns, {0, 2})
    assert followed.mixing == {1}
    assert [eqn.outvars[0] in followed.along() for eqn in eqns] == [1, 0, 1, 0]
    with pytest.raises(MixedError):
        Followed(x, 1).follow(eqns, range(4))


def test_random_numbers_of_all_slices_are_not_those_of_each():
    def with_noise(x, key):
        return x * jax.random.bits(key, x.shape).astype(np.float32)

    def with_ones(x, key):
        return x * jnp.ones(x.shape)

    for f, is_mixed in ((with_noise, True), (with_ones, False)):
        closed = jax.make_jaxpr(f)(X, jax.random.key(0))
        jaxpr = programs.inlined(closed).jaxpr
        followed = Followed(jaxpr.invars[0], 1)
        followed.follow(jaxpr.eqns, ())
        assert bool(followed.mixing) == is_mixed
