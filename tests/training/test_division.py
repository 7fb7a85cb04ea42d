"""Programs of a tree are divided: drawn ones, with loops and conditionals.

The expected numbers are those of the program before, as NumPy computes it.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradxform._jax import jaxprs, programs
from gradxform._matrices import division, unplaced
from tests.in_numpy import Program

pytestmark = pytest.mark.usefixtures("standard_promotion")

FEW = 4
SHAPES = {"a": (2, 3), "b": (3, 2), "c": (2, 3, 1)}
TIED = {"scan", "while", "cond", "optimization_barrier", "checkpoint"}
# A branch of it has a number of all products: they are computed again for each leaf.
AGAIN = {41}


def each(f, *trees):
    return jax.tree.map(f, *trees)


def product(x):
    """Of a stack each matrix is divided by a number of all."""
    return x @ jnp.matrix_transpose(x) @ x / (1 + jnp.sum(x * x))


def total(t):
    return sum(jnp.sum(x * x) for x in jax.tree.leaves(t))


def drawn(rng, depth, may_mix=True):
    """A function of a tree and of a count; leaves meet in numbers alone."""
    kinds = ["product", "sum"]
    if depth:
        kinds += ["then", "jit", "checkpoint", "barrier"]
        kinds += ["count", "scan", "stack", "while"]
        kinds += ["platforms", "number", "norm"] * may_mix
    kind = rng.choice(kinds)
    n = rng.randrange(1, 4)
    if kind == "product":
        return lambda t, i: each(product, t)
    if kind == "sum":
        return lambda t, i: each(lambda x: x / n + i, t)
    # Of a loop each turn is of one leaf.
    is_loop = kind in ("scan", "stack", "while")
    f, g = (drawn(rng, depth - 1, may_mix and not is_loop) for _ in range(2))
    return {
        "then": lambda t, i: g(f(t, i), i),
        "jit": jax.jit(f),
        "count": lambda t, i: lax.cond(i < n, f, g, t, i),
        "number": lambda t, i: lax.cond(total(t) < n, f, g, t, i),
        "scan": lambda t, i: lax.fori_loop(0, n, lambda k, t: f(t, k), t),
        "stack": lambda t, i: stacked(f, t, i),
        "while": lambda t, i: lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1], i)), (0, t)
        )[1],
        "barrier": lambda t, i: f(*lax.optimization_barrier((t, i))),
        "checkpoint": jax.checkpoint(f),
        "platforms": lambda t, i: lax.platform_dependent(t, i, cpu=f, default=f),
        "norm": lambda t, i: each(lambda x: x / (1 + total(f(t, i))), g(t, i)),
    }[kind]


def stacked(f, t, i):
    last, ys = lax.scan(
        lambda t, s: (each(jnp.add, f(t, i), s), f(t, i)),
        *(t, each(lambda x: jnp.stack([x, 2 * x]), t)),
        reverse=True,
    )
    return each(lambda x, y: x + y[0] - y[1], last, ys)


def large(atoms):
    return [x for x in atoms if jaxprs.is_variable(x) and np.prod(x.aval.shape) >= FEW]


def leaves_of(jaxpr):
    """The leaves that each large array is made of."""
    of = {x: {k} for k, x in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        read = set().union(*(of.get(x, set()) for x in large(eqn.invars)))
        of.update((x, read) for x in large(eqn.outvars))
    return of


def tree(rng):
    entries = np.arange(6, dtype=np.float32) / 9
    return {k: (entries + rng.random()).reshape(s) for k, s in SHAPES.items()}


def divided_of(f, t):
    with unplaced.tracing():
        closed = programs.inlined(jax.make_jaxpr(f)(t, 1))
        return closed, division.divided(closed, FEW)


@pytest.mark.every
@pytest.mark.parametrize("part", range(4))
def test_each_operation_is_of_one_leaf(part):
    for seed in range(12 * part, 12 * part + 12):
        rng = random.Random(seed)
        f, t = drawn(rng, 3), tree(rng)
        closed, divided = divided_of(f, t)
        before, after = Program(closed), Program(divided)
        for i in range(3):
            for x, y in zip(before(t, i), after(t, i), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5)
        of = leaves_of(divided.jaxpr)
        for eqn in divided.jaxpr.eqns:
            if eqn.primitive.name in TIED:
                made = set().union(*(of[x] for x in large(eqn.outvars)))
                assert len(made) <= 1, (seed, eqn)
        once, here = (x.ran["dot_general"] for x in (before, after))
        assert here == once or (seed in AGAIN and here < 2 * once), seed


def test_a_loop_that_mixes_leaves_stays_one():
    def f(t, n):
        return lax.fori_loop(0, 3, lambda _, t: each(lambda x: x / total(t), t), t)

    _, divided = divided_of(f, tree(random.Random(0)))
    (loop,) = (eqn for eqn in divided.eqns if eqn.primitive.name == "scan")
    assert len(large(loop.outvars)) == len(SHAPES)


def test_operations_of_one_leaf_stay_as_they_are():
    def f(t, n):
        (x,) = t
        x, y = lax.cond(n > 0, lambda x: (x, 2 * x), lambda x: (3 * x, x), x)
        return lax.fori_loop(0, 3, lambda _, xy: (xy[1], xy[0]), (x, y))

    closed, divided = divided_of(f, [np.ones((2, 3), np.float32)])
    assert divided is closed


def test_a_branch_may_return_what_stands_in_the_program():
    """Beside a number of all leaves, which is computed before."""

    def f(t, n):
        def ones(t):
            return each(lambda x: x / total(t), t), 1.0, np.float32(2), np.int8(3), True

        def twos(t):
            return t, 2.0, np.float32(1), np.int8(2), False

        return lax.cond(n > 0, ones, twos, t)

    t = tree(random.Random(0))
    closed, divided = divided_of(f, t)
    for n in range(2):
        for x, y in zip(Program(closed)(t, n), Program(divided)(t, n), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
    types = [[str(x) for x in program.out_avals] for program in (closed, divided)]
    assert types[0] == types[1]


def test_a_number_of_a_stack_is_computed_before_its_branch():
    """In the branch a device has some of its matrices."""

    def f(t, n):
        (x,) = t
        return lax.cond(n > 0, lambda x: x / jnp.sum(x), lambda x: x, x)

    _, divided = divided_of(f, [np.ones((2, 3, 2), np.float32)])
    number, stack = (eqn for eqn in divided.eqns if eqn.primitive.name == "cond")
    has_sum = [
        any(jaxprs.anywhere(x.jaxpr, "reduce_sum") for x in eqn.params["branches"])
        for eqn in (number, stack)
    ]
    assert has_sum == [True, False]
