"""Two programs are equal if they compute the same, whatever their variables are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from gradxform._matrices import equality

X = jax.ShapeDtypeStruct((3, 3), "float32")


def plus(*numbers):
    """Its constant is that of an inner program."""
    return jax.jit(lambda x: x + np.float32([numbers]))


def long(last):
    return plus(*[0.0] * 9, last)


def with_rule(factor, number=2.0):
    @jax.custom_jvp
    def f(x):
        return x * number

    f.defjvp(lambda p, t: (f(*p), factor * t[0]))
    return f


def pulled(factor):
    @jax.custom_vjp
    def f(x):
        return x * 2.0

    f.defvjp(lambda x: (f(x), None), lambda _, g: (factor * g,))
    return f


def marked(**metadata):
    def f(x):
        with set_xla_metadata(**metadata):
            return jnp.sin(x)

    return f


def of_type(dtype):
    return lambda x: lax.convert_element_type(x, dtype)


# Programs of two matrices. Each differs from every other one.
PROGRAMS = {
    "nothing": lambda x, y: (x, y),
    "in another order": lambda x, y: (y, x),
    "a number": lambda x, y: (x, jnp.float32(1)),
    "another number": lambda x, y: (x, jnp.float32(2)),
    "sine": lambda x, y: (jnp.sin(x), y),
    "of the second": lambda x, y: (jnp.sin(y), y),
    "cosine": lambda x, y: (jnp.cos(x), y),
    "two times sine": lambda x, y: (jnp.sin(jnp.sin(x)), y),
    "twice": lambda x, y: (x * 2.0, y),
    "three times": lambda x, y: (x * 3.0, y),
    "minus": lambda x, y: (x - y, y),
    "minus the first": lambda x, y: (y - x, y),
    "over rows": lambda x, y: (jnp.sum(x, 0), y),
    "over columns": lambda x, y: (jnp.sum(x, 1), y),
    "half": lambda x, y: (of_type("float16")(x), y),
    "another half": lambda x, y: (of_type("bfloat16")(x), y),
    **{
        f"with {f}": functools.partial(lambda g, x, y: (g(x), y), g)
        for f, g in {
            "1, 2, 3": plus(1, 2, 3),
            "1, 2, 4": plus(1, 2, 4),
            "a row": plus(1, 1, 1),
            "a column": jax.jit(lambda x: x + np.float32([[1], [1], [1]])),
            "a jit": jax.jit(jnp.sin),
            "another jit": jax.jit(jnp.cos),
            "a loop": lambda x: lax.fori_loop(0, 3, lambda _, x: x + 1, x),
            "another loop": lambda x: lax.fori_loop(0, 3, lambda _, x: x + 2, x),
            "a longer loop": lambda x: lax.fori_loop(0, 4, lambda _, x: x + 1, x),
            "a branch": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
            "other branches": lambda x: lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x),
            "a rule": with_rule(2.0),
            "another rule": with_rule(3.0),
            "a rule of another function": with_rule(2.0, 3.0),
            "one pulled back": pulled(2.0),
            "pulled back in another way": pulled(3.0),
            "a mark": marked(a="1"),
            "another mark": marked(a="2"),
            "two marks": marked(a="1", b="1"),
        }.items()
    },
}


def key(f, *types):
    # A function that JAX does not know is traced again.
    jaxpr = jax.make_jaxpr(functools.partial(f))(*types).jaxpr
    return equality.of_equations(jaxpr.invars, jaxpr.eqns, jaxpr.outvars)


def test_a_program_is_equal_to_itself_and_to_no_other():
    keys = {name: key(f, X, X) for name, f in PROGRAMS.items()}
    for name, f in PROGRAMS.items():
        assert key(f, X, X) == keys[name], name
        assert hash(key(f, X, X)) == hash(keys[name]), name
    for (a, x), (b, y) in itertools.combinations(keys.items(), 2):
        assert x != y, (a, b)


def test_types_count():
    types = [X, X.update(dtype="bfloat16"), X.update(shape=(3, 2))]
    assert len({key(jnp.sin, x) for x in types}) == len(types)


def test_each_entry_of_a_long_constant_counts():
    wide = jax.ShapeDtypeStruct((1, 10), "float32")
    assert key(long(1.0), wide) == key(long(1.0), wide)
    assert key(long(1.0), wide) != key(long(2.0), wide)
    entries = np.zeros(10_000, np.float32)
    other = entries.copy()
    other[-1] = 1
    assert equality.of_value(entries) == equality.of_value(entries.copy())
    values = [entries, other, entries[:-1], entries.reshape(2, -1), entries > 0]
    assert len({*map(equality.of_value, values)}) == len(values)


def test_an_equation_of_the_same_variables():
    def f(x, y):
        return x - y, x - y, y - x, x - 2.0, x - 3.0

    eqns = jax.make_jaxpr(f)(X, X).eqns
    first, again, *others = (equality.of_equation(eqn, id) for eqn in eqns)
    assert first == again
    assert len({first, *others}) == 1 + len(others)


def test_keys_are_equal_by_their_bits_and_kind():
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]
    assert len({*map(equality.of_value, keys)}) == len(keys)
    assert equality.of_value(keys[0]) == equality.of_value(jax.random.key(0))


def test_a_traced_value_is_equal_to_itself_alone():
    def f(x, y):
        assert equality.of_value(x) == equality.of_value(x)
        assert hash(equality.of_value(x)) == hash(equality.of_value(x))
        assert equality.of_value(x) not in (equality.of_value(y), 1.0)
        return x

    jax.eval_shape(f, X, X)


def test_whole_programs_have_their_constants_and_derivatives():
    functions = [plus(1, 2, 3), plus(1, 2, 4), with_rule(2.0), with_rule(3.0)]
    keys = [equality.of_program(jax.make_jaxpr(f)(X)) for f in functions]
    assert len({*keys}) == len(keys)
    for f, of in zip(functions, keys, strict=True):
        again = jax.make_jaxpr(functools.partial(f))(X)
        assert equality.of_program(again) == of


def test_a_rule_that_refuses_a_derivative_is_equal_to_itself_alone():
    def refusing():
        @jax.custom_vjp
        def f(x):
            return x * 2.0

        def backward(_, g):
            raise NotImplementedError

        f.defvjp(lambda x: (f(x), None), backward)
        return f

    jaxprs = [jax.make_jaxpr(refusing())(X) for _ in range(2)]
    first, second = map(equality.of_program, jaxprs)
    assert first == equality.of_program(jaxprs[0])
    assert first != second
