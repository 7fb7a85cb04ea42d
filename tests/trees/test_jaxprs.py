"""Programs are read, and not run: which equations need, make and follow a variable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from gradxform._jax import jaxprs, programs
from gradxform._jax.compilers import on_cpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def traced(f, *args):
    return jax.make_jaxpr(f)(*args)


# Whether each slice of the result is made of one slice of the only array.
FOLLOWS = {
    "a cast": (lambda x, y: x.astype("float16"), True),
    "the other way": (lambda x, y: x.T, True),
    "another shape": (lambda x, y: x.reshape(6), True),
    "times a number": (lambda x, y: x * 2.0, True),
    "negative": (lambda x, y: -x, True),
    "of two": (lambda x, y: x * y, False),
    "with itself": (lambda x, y: x * x, False),
    "a sum": (lambda x, y: lax.reduce_sum_p.bind(x, axes=(0,)), False),
    "sorted": (lambda x, y: lax.sort(x), False),
}


@pytest.mark.every
@pytest.mark.parametrize("name", FOLLOWS)
def test_an_operation_of_one_array_follows_it(name):
    f, wanted = FOLLOWS[name]
    (eqn, *_) = traced(f, X, X).eqns
    assert jaxprs.follows(eqn) == wanted


def test_the_only_array_may_stand_behind_a_number():
    (eqn,) = traced(lambda x: 1.0 - x, X).eqns
    assert jaxprs.operand(eqn) == 1


def test_what_is_made_of_variables():
    def f(a, b):
        along = a.T * 2.0  # Two equations.
        both = along + b  # Of both.
        return jnp.sin(both), jnp.cos(b)

    jaxpr = traced(f, X, X.T).jaxpr
    a, b = jaxpr.invars
    turned, along, both, sine, cosine = (eqn.outvars[0] for eqn in jaxpr.eqns)
    assert jaxprs.derived_from(jaxpr, [0]) == {a, turned, along}
    assert jaxprs.derived_from(jaxpr, [1]) == {b, cosine}
    assert jaxprs.made_of(jaxpr.eqns, [a]) == {a, turned, along}
    everything = {a, b, turned, along, both, sine, cosine}
    assert jaxprs.made_of(jaxpr.eqns, [a, b]) == everything
    assert jaxprs.descendants(jaxpr.eqns, [b]) == {b, both, sine, cosine}
    assert jaxprs.variables_read(jaxpr.eqns) == [a, turned, along, b, both]
    assert jaxprs.among([a, b, a], {a}) == {0: a, 2: a}


def test_one_result_needs_its_own_equations():
    called = []

    def f(a, b):
        io_callback(called.append, None, a)
        return jnp.sin(a), jnp.cos(b) + 1.0

    closed = traced(f, 0.5, 2.0)
    assert jaxprs.calls_host(closed)
    assert not jaxprs.calls_host(traced(jnp.sin, 0.5))
    needed = [len(jaxprs.needed(closed.eqns, [x])) for x in closed.jaxpr.outvars]
    assert needed == [2, 3]  # The call has an effect.
    for index, (of, arg) in enumerate([(np.sin(0.5), 0.5), (np.cos(2) + 1, 2.0)]):
        g, taken = jaxprs.result(closed, index, [0.5, 2.0])
        assert taken == [arg]
        np.testing.assert_allclose(g(taken), of, 1e-6)
    assert not called


def test_equations_are_found_and_replaced_inside_of_others():
    def f(x):
        g = jax.checkpoint(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x))
        return lax.scan(lambda c, _: (g(c), jnp.sin(c)), x, length=2)

    closed = traced(f, 0.25)
    assert len(jaxprs.anywhere(closed.jaxpr, "sin")) == 2

    def cosine(eqn):
        if jaxprs.name_of(eqn) != "sin":
            return eqn
        return eqn.replace(primitive=lax.cos_p)

    new = jaxprs.replaced(closed, cosine)
    assert not jaxprs.anywhere(new.jaxpr, "sin")
    got = jaxprs.run(new.jaxpr, [*new.consts, 0.25])
    once = np.cos(0.25)
    np.testing.assert_allclose(got[0], np.cos(once), 1e-6)
    np.testing.assert_allclose(got[1], [once, np.cos(once)], 1e-6)


def test_a_result_may_be_a_number_or_an_argument():
    closed = traced(lambda x: (x, jnp.float32(3), np.int32(2)), 0.5)
    got = jaxprs.run(closed.jaxpr, [*closed.consts, 0.5])
    assert [float(x) for x in got] == [0.5, 3, 2]
    wanted = [x.dtype for x in closed.out_avals]
    assert [x.dtype for x in got] == wanted


OFF_CPU = {
    "a constant": (lambda x: jnp.full(3, 7.0), 7),
    "one off CPU": (on_cpu(jnp.sin, lambda x: jnp.full(3, 5.0)), 5),
    "one on CPU": (on_cpu(lambda x: jnp.full(3, 5.0), jnp.sin), None),
    "an array": (lambda x: lax.broadcast(x[0], (3,)), None),
    "times a number": (lambda x: 2.0 * x, None),
    "an argument": (lambda x: x, None),
}


@pytest.mark.every
@pytest.mark.parametrize("name", OFF_CPU)
def test_a_number_that_is_constant_on_other_platforms(name):
    f, wanted = OFF_CPU[name]
    # Of two results it is the second; another equation comes first.
    jaxpr = traced(lambda x: (jnp.full(3, 9.0), f(x)), X[0]).jaxpr
    assert jaxprs.constant_off_cpu(jaxpr, jaxpr.outvars[1]) == wanted


def test_where_an_input_is_first_used():
    """What follows it is no use. Inside of a ``jit`` the place inside counts, too."""

    def f(a, b, c, d):
        half = a.astype("float16")
        inner = jax.jit(lambda x, y: (jnp.cos(y) + 1.0, y @ x))
        first, second = inner(b, c)
        return first, second, jnp.sum(half) + 1

    jaxpr = traced(f, X, X, X.T.copy(), X).jaxpr
    names = [eqn.primitive.name for eqn in jaxprs.equations(jaxpr)]
    at = names.index("jit") if "jit" in names else names.index("pjit")
    assert programs.first_use(jaxpr, 0) == (names.index("reduce_sum"),)
    inside = programs.program(jaxprs.equations(jaxpr)[at]).jaxpr
    of = [eqn.primitive.name for eqn in jaxprs.equations(inside)].index
    assert programs.first_use(jaxpr, 1) == (at, of("dot_general"))
    assert programs.first_use(jaxpr, 2) == (at, of("dot_general"))
    assert programs.first_use(jaxpr, 3) == (len(names),)
