"""Cores of traced updates: what is one, and what it does with some matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradxform._jax import jaxprs
from gradxform._matrices import cores, unplaced
from tests.in_numpy import Program

pytestmark = pytest.mark.every

M, N = 6, 12
STACK, LEAF = (4, M, N), (M, N)


def product(x):
    gram = x @ x.T
    return gram / (1 + jnp.sum(gram * gram)) @ x


def decides(x):
    return lax.cond(x[0, 0] > 0, product, lambda x: x, x)


def if_due(x, n):
    return lax.cond(n > 1, product, lambda x: x, x)


def of_stack(f):
    return lambda x, *few: jax.vmap(lambda x: f(x, *few))(x)


def of_last_axis(f):
    def moved(x, *few):
        return jnp.moveaxis(of_stack(f)(jnp.moveaxis(x, -1, 0), *few), 0, -1)

    return moved


def scaled(x, n):
    return (n * (x @ x.T)) @ x


def traced(f, *args):
    with unplaced.tracing():
        return jax.make_jaxpr(f)(*args)


def core_of(f, *args):
    """That of a function of a gradient and of others."""
    closed = traced(f, *args)
    gradients = closed.jaxpr.invars[:1]
    lying = cores.Lying({}, gradients, set, {}, lambda *_: False)
    (core,), _ = cores.TracedUpdate(closed).cores(lying)
    return core


# An update and that of a matrix, the shape of its gradient, and whether it has another
# number; the number of axes of matrices that are multiplied, and how often a
# conditional is run.
CASES = {
    "a leaf": (product, product, LEAF, False, 3, 0),
    "a stack": (of_stack(product), product, STACK, False, 3, 0),
    "the last axis": (of_last_axis(product), product, (M, N, 4), False, 3, 0),
    "a number": (of_stack(scaled), scaled, STACK, True, 3, 0),
    "a number, the last axis": (of_last_axis(scaled), scaled, (M, N, 4), True, 3, 0),
    "each decides": (decides, decides, LEAF, False, 2, 3),
    "a number decides": (if_due, if_due, LEAF, True, 3, 1),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_results_for_some_matrices(name, count):
    f, one, shape, has_number, ndim, branches = CASES[name]
    number = [np.float32(2)] * has_number
    types = [jax.ShapeDtypeStruct(shape, np.float32), *number]
    core = core_of(f, *types)
    matrices = cores.matrices(core)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, M, N)).astype(np.float32)
    are_same = [not core.is_array(read) for read in core.reads]
    args = [
        number[0].astype(read.aval.dtype) if same else x
        for read, same in zip(core.reads, are_same, strict=True)
    ]
    program = Program(traced(lambda *args: matrices.results(are_same, args), *args))
    (found,) = program(*args)
    wanted = Program(traced(one, x[0], *number))
    for y, z in zip(found, x, strict=True):
        np.testing.assert_allclose(y, wanted(z, *number)[0], rtol=1e-5)
    if count > 1 or name == "a leaf":
        ndims = {
            len(operand.aval.shape)
            for eqn in jaxprs.anywhere(program.closed.jaxpr, "dot_general")
            for operand in eqn.invars
        }
        assert ndims == {ndim if count > 1 else 2}
        assert program.ran["cond"] == branches


def test_cores_that_do_the_same_have_one_key():
    def key(f, shape=STACK):
        return core_of(f, jax.ShapeDtypeStruct(shape, np.float32)).key()

    def twice(x):
        return 2 * x @ x.T @ (3 * x)

    others = [
        key(of_stack(twice)),
        key(of_last_axis(product), (M, N, 4)),
        key(product, LEAF),
    ]
    first, *again = (key(of_stack(product)) for _ in range(2))
    assert [first] == again
    assert len({first, *others}) == 4


def test_numbers_of_each_matrix_are_those_of_its_own():
    """Stacks of several parameters, each with a number."""
    core = core_of(
        of_stack(scaled), jax.ShapeDtypeStruct(STACK, np.float32), np.float32(2)
    )
    matrices = cores.matrices(core)
    x = np.random.default_rng(0).standard_normal((2, M, N)).astype(np.float32)
    args = [x if core.is_array(read) else np.float32([2, 3]) for read in core.reads]
    program = Program(traced(lambda *args: matrices.results([False] * 2, args), *args))
    (found,) = program(*args)
    for n, (y, z) in enumerate(zip(found, x, strict=True)):
        np.testing.assert_allclose(y, (n + 2) * z @ z.T @ z, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "travels"), [((8, 7), False), ((9, 7), False), ((8, 8), True)]
)
def test_few_entries_are_the_same_for_all_matrices(shape, travels):
    """Of fewer than 64 each device reads all."""

    def update(x, table):
        return x @ table @ table.T @ x.T @ x

    types = [jax.ShapeDtypeStruct(s, np.float32) for s in ((16, shape[0]), shape)]
    core = core_of(update, *types)
    (table,) = (x for x in core.reads if x.aval.shape == shape)
    assert core.is_array(table) == travels


X, Y, V = (np.ones(s, np.float32) for s in ((M, M), (M, M), (M,)))
# Operations, and whether they need whole matrices.
OPERATIONS = {
    "a product": (lambda: X @ Y, True),
    "in a stack": (lambda: lax.batch_matmul(X[None], Y[None]), True),
    "in a jit": (lambda: jax.jit(jnp.matmul)(X, Y), True),
    "in a branch": (lambda: lax.cond(V[0] > 0, lambda: X @ Y, lambda: X), True),
    "factors": (lambda: jnp.linalg.qr(X), True),
    "with a vector": (lambda: X @ V, False),
    "a vector with it": (lambda: V @ X, False),
    "of vectors": (lambda: V @ V, False),
    "an outer product": (lambda: jnp.outer(V, V), False),
    "nothing is added": (lambda: lax.dot_general(X, Y, (((), ()), ((), ()))), False),
    "all is added": (
        lambda: lax.dot_general(X, Y, (((0, 1), (0, 1)), ((), ()))),
        False,
    ),
    "of rows": (lambda: lax.dot_general(X, Y, (((1,), (1,)), ((0,), (0,)))), False),
    "a sum": (lambda: jnp.sum(X, 0), False),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_needs_whole_matrices(name):
    f, needs = OPERATIONS[name]

    def of_variables(*args):
        global X, Y, V
        before = X, Y, V
        X, Y, V = args
        try:
            return f()
        finally:
            X, Y, V = before

    assert cores.has_matrices(traced(of_variables, X, Y, V).jaxpr) == needs


def test_equal_numbers_that_decide_are_one():
    """Sums of arrays are not, as they lie elsewhere."""

    def update(x, y, n):
        def of(x):
            x = lax.cond(n % 3 > 0, product, lambda x: x, x)
            return x * jnp.float32(n + 1) * jnp.sum(x)

        return of(x), of(y)

    update = cores.TracedUpdate(traced(update, X, Y, 5))
    eqns = jaxprs.needed(update.equations, update.jaxpr.outvars)
    one, other = (eqn for eqn in eqns if eqn.primitive.name == "cond")
    assert one.invars[0] is other.invars[0]
    kinds = [eqn.primitive.name for eqn in eqns]
    assert kinds.count("add") == 1
    assert kinds.count("reduce_sum") == 2
    closed = update.closed
    found = Program(closed)(X, 2 * Y, 5)
    for x, y in zip(found, Program(traced(lambda *a: a, *found))(*found), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_refused_is_described():
    """By its operation, some of its operands, and what to do."""

    def printing(*arrays):
        def turn(_, arrays):
            jax.debug.print("{}", arrays[0][0, 0])
            return tuple(map(product, arrays))

        return lax.fori_loop(0, 2, turn, arrays)

    shapes = [(M, n) for n in range(11, 16)]
    for number, last in ((3, "[6, 13]"), (4, "[6, 14]"), (5, "[6, 14], …")):
        args = [np.ones(s, np.float32) for s in shapes[:number]]
        with pytest.raises(cores.NoCoreError) as error:
            core_of(printing, *args)
        start, _, end = str(error.value).partition(" has effects, with ")
        assert start.startswith("whole_matrices takes an update that treats the matri")
        assert "'scan'" in start
        assert end.startswith("float32[6, 11], float32[6, 12], float32[6, 13]")
        shown, _, hint = end.partition(". ")
        assert shown.endswith(last)
        assert hint.startswith("Keep it outside of whole_matrices, or have the arrays")


def test_what_decides_for_several_is_refused_with_a_hint():
    def mixing(x, y):
        return lax.cond(x[0, 0] > 0, lambda x, y: x @ y, lambda x, y: x, x, y)

    closed = traced(mixing, *np.ones((2, M + 3, M + 3), np.float32))
    lying = cores.Lying({}, closed.jaxpr.invars, set, {}, lambda *_: False)
    with pytest.raises(cores.NoCoreError, match=r"several parameters.* Put gates, and"):
        cores.TracedUpdate(closed).cores(lying)
