"""To whom results belong, in programs that are written for it, and in drawn ones."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradxform._jax import jaxprs, programs
from gradxform._matrices import unplaced
from gradxform._matrices.owners import Nobody, Owners, Sets, is_integer, is_number
from tests.training.test_division import FEW, drawn, tree

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.every]


def owners_of(f, *args):
    """Those of the arguments and those of the results of a program."""
    with unplaced.tracing():
        jaxpr = programs.inlined(jax.make_jaxpr(f)(*args)).jaxpr
    few = [x for x in jaxpr.invars if np.prod(x.aval.shape) < FEW]
    eqns = jaxprs.all_equations(jaxpr)
    free = jaxprs.made_of(eqns, [*few, *jaxpr.constvars])
    owners = Owners(jaxpr, eqns, free)
    assert len(owners.equations) == len(eqns)
    for eqn, owner in zip(eqns, owners.equations, strict=True):
        if all(map(is_number, eqn.outvars)):
            assert {owners.of[x] for x in eqn.outvars} <= {owner}
    results = [owners.of.get(x, Nobody.FREE) for x in jaxpr.outvars]
    return [owners.of[x] for x in jaxpr.invars], results


def numbers(x):
    return jnp.stack([jnp.sum(x), jnp.max(x)])


def looped(f, *state):
    return lax.fori_loop(0, 3, lambda _, state: f(*state), state)


def counted(f, *state):
    def turn(state):
        n, *others = state
        return (n + 1, *f(*others))

    return lax.while_loop(lambda state: state[0] < 3, turn, (0, *state))[1:]


def added(x, y):
    return x + y, y


def swapped(x, y):
    return y, x


TABLE = np.arange(9, dtype=np.float32).reshape(3, 3)


def with_table(table, x, y):
    return table * x, table * y


@jax.custom_jvp
def with_constant(x, y):
    return with_table(TABLE, x, y)


with_constant.defjvp(lambda p, t: (with_constant(*p), t))


def zeros(x):
    return jnp.zeros_like(x)


# Of two matrices, two numbers and a count: results, and whose each is: "a", "b", "t"
# if both are one, "n" nobody's, "s" that of several, "o" another one.
CASES = {
    "arrays": (lambda a, b, c, i: (2 * a, b @ b.T, a * c[0]), "aba"),
    "numbers": (lambda a, b, c, i: (jnp.sum(a), jnp.sum(a) * c[0], c, i), "aann"),
    "of both": (lambda a, b, c, i: (jnp.sum(a) * jnp.sum(b), a), "sa"),
    "of a number of both": (lambda a, b, c, i: (a * jnp.sum(b), b), "ab"),
    "both": (lambda a, b, c, i: (a + b, a, b), "ttt"),
    "some numbers": (lambda a, b, c, i: (numbers(a), 2 * numbers(b)), "ab"),
    "numbers of both": (
        lambda a, b, c, i: (jnp.stack([jnp.sum(a), jnp.sum(b)]), a, b),
        "oab",
    ),
    "one after another": (
        lambda a, b, c, i: (jnp.concatenate([a, 2 * a]), jnp.concatenate([b, a])),
        "ao",
    ),
    "beside what is free": (
        lambda a, b, c, i: (jnp.concatenate([jnp.ones((1, 3)), a]), b),
        "ab",
    ),
    "free arrays": (lambda a, b, c, i: (jnp.outer(c, c) + i, a), "na"),
    "a barrier": (lambda a, b, c, i: lax.optimization_barrier((a, b, c)), "abo"),
    "a conditional": (
        lambda a, b, c, i: lax.cond(i > 0, swapped, lambda x, y: (2 * y, x), a, b),
        "ba",
    ),
    "a branch mixes": (
        lambda a, b, c, i: lax.cond(i > 0, added, lambda x, y: (x, y), a, b),
        "tt",
    ),
    "a branch of zeros": (
        lambda a, b, c, i: lax.cond(
            i > 0, lambda x, y: (zeros(x), y), lambda x, y: (y, zeros(y)), a, b
        ),
        "bb",
    ),
    "a branch of free arrays": (
        lambda a, b, c, i: lax.cond(
            i > 0, lambda x, y: x, lambda x, y: jnp.ones((3, 1)) * y[0] + x, a, c
        ),
        "a",
    ),
    "a loop": (lambda a, b, c, i: looped(lambda x, y: (x @ x.T @ x, y), a, b), "ab"),
    "turns mix": (lambda a, b, c, i: looped(swapped, a, b), "tt"),
    "what is free goes on": (
        lambda a, b, c, i: (looped(added, zeros(a), a)[0], b),
        "ab",
    ),
    "what is free changes": (
        lambda a, b, c, i: (*looped(swapped, zeros(a), a), b),
        "aab",
    ),
    "and meets another one": (
        lambda a, b, c, i: looped(lambda x, y, z: (x + y, y, z), zeros(a), a, b),
        "aab",
    ),
    "while": (lambda a, b, c, i: counted(lambda x, y: (2 * x, y), a, b), "ab"),
    "while turns mix": (lambda a, b, c, i: counted(swapped, a, b), "tt"),
    "while what is free goes on": (
        lambda a, b, c, i: (counted(added, zeros(a), a)[0], b),
        "ab",
    ),
    "rows": (
        lambda a, b, c, i: lax.scan(
            lambda s, x: (s + jnp.sum(x[1]), (x[1], x[0])), 0.0, (a, b)
        )[1],
        "ba",
    ),
    "within a checkpoint": (
        lambda a, b, c, i: jax.checkpoint(lambda x, y: (y * c[0], x))(a, b),
        "ba",
    ),
    "within a loop in a loop": (
        lambda a, b, c, i: looped(lambda x, y: looped(swapped, x, y), a, b),
        "tt",
    ),
    "with a free table": (
        lambda a, b, c, i: looped(
            functools.partial(with_table, jnp.outer(jnp.tile(c[:1], 3), c[:1])), a, b
        ),
        "ab",
    ),
    **{
        f"with a constant, {name}": (lambda a, b, c, i, f=f: f(a, b), "ab")
        for name, f in {
            "checkpoint": jax.checkpoint(functools.partial(with_table, TABLE)),
            "a derivative of its own": with_constant,
            "loop": functools.partial(looped, functools.partial(with_table, TABLE)),
        }.items()
    },
    "with a table of a turn": (
        lambda a, b, c, i: looped(
            lambda x, y: with_table(jnp.arange(3.0)[None] * c[0], x, y), a, b
        ),
        "ab",
    ),
    "a branch puts parts together": (
        lambda a, b, c, i: lax.cond(
            i > 0,
            lambda x, y: (jnp.concatenate([x[1:], x[:1]]), y),
            lambda x, y: (zeros(x), y),
            a,
            b,
        ),
        "ab",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_whose_a_result_is(name):
    f, expected = CASES[name]
    a, b, c, i = (np.ones(s, np.float32) for s in ((3, 3), (3, 3), (2,), ()))
    (of_a, of_b, *of_few), results = owners_of(f, a, b, c, i.astype(np.int32))
    assert of_few == [Nobody.FREE] * 2
    assert (of_a == of_b) == ("t" in expected)
    whose = {"a": of_a, "b": of_b, "t": of_a}
    whose |= {"n": Nobody.FREE, "s": Nobody.SEVERAL}
    for found, name in zip(results, expected, strict=True):
        if name == "o":
            assert found not in whose.values()
        else:
            assert found == whose[name]


def test_somebody_may_know_what_is_of_one_owner():
    closed = jax.make_jaxpr(lambda a, b, c: (2 * a, 3 * b, 4 * c))(*np.ones((3, 2, 2)))
    jaxpr, eqns = closed.jaxpr, closed.jaxpr.eqns
    a, b, c = Owners(jaxpr, eqns, (), [jaxpr.invars[:2]]).equations
    assert a == b != c


def mixing(rng):
    """One of two leaves is added to the other one."""
    one, other = rng.sample("abc", 2)

    def mixed(t):
        return t | {one: t[one] + jnp.sum(t[other]) * t[other].reshape(t[one].shape)}

    return mixed, {one, other}


def test_leaves_of_drawn_programs_are_apart_but_for_those_that_meet():
    for seed in range(8):
        rng = random.Random(seed)
        f, g = drawn(rng, 2), drawn(rng, 1)
        mixed, pair = mixing(rng)
        t = tree(rng)
        before, after = owners_of(lambda t, i, f=f: f(t, i), t, 1)
        assert before[:3] == after, seed
        assert len({*after}) == 3, seed

        def met(t, i, f=f, g=g, mixed=mixed):
            return lax.cond(i > 1, lambda t: g(mixed(t), i), lambda t: t, f(t, i))

        before, after = owners_of(met, t, 1)
        assert before[:3] == after, seed
        owner = dict(zip("abc", after, strict=True))
        assert len({owner[name] for name in pair}) == 1, seed
        assert len({*after}) == 2, seed


def test_sets_are_those_of_what_is_joined():
    """As elements with colours: a join gives all of both sets one colour."""
    rng = random.Random(0)
    sets, colour = Sets(), {n: n for n in range(30)}
    for _ in range(20):
        some = rng.sample(range(30), rng.randrange(1, 4))
        sets.join(some)
        joined = {colour[n] for n in some}
        colour = {n: min(joined) if c in joined else c for n, c in colour.items()}
        pairs = [rng.sample(range(30), 2) for _ in range(20)]
        for x, y in pairs:
            assert (sets.find(x) == sets.find(y)) == (colour[x] == colour[y])


def test_numbers_and_those_that_decide():
    types = {
        "float32": False,
        "complex64": False,
        "uint32": False,
        "int8": True,
        "int32": True,
        "bool": True,
    }
    for dtype, decides in types.items():
        for shape, is_one in {(): True, (1,): True, (1, 1): True, (2,): False}.items():
            x = jax.make_jaxpr(lambda x: x)(np.ones(shape, dtype)).jaxpr.invars[0]
            assert is_number(x) == is_one
            assert is_integer(x) == (decides and shape == ())
    key = jax.eval_shape(jax.random.key, 0)
    assert not is_integer(jax.make_jaxpr(lambda x: x)(key).jaxpr.invars[0])
    empty = jax.make_jaxpr(lambda x: x)(np.ones((0, 3))).jaxpr.invars[0]
    assert is_number(empty)
