"""When an array is needed: conditionals drawn in each other, with all choices tried."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from gradxform._jax import jaxprs
from gradxform._matrices import due

NUMBERS, ARRAYS, BRANCHES = ("i", "j"), ("a", "b", "c"), 3
CHOICES = [
    dict(zip(NUMBERS, each, strict=True))
    for each in itertools.product(range(BRANCHES), repeat=len(NUMBERS))
]


def switch(index, branches, operands):
    """As `lax.switch`, but for a number that is not clamped: it is the same inside."""
    usual = jax.make_jaxpr(lambda n, x: jax.lax.switch(n, branches, x))(0, operands)
    (eqn,) = (x for x in usual.eqns if "branches" in x.params)
    leaves, tree = jax.tree.flatten(operands)
    traced = tuple(
        jax.make_jaxpr(lambda *x, f=f: f(jax.tree.unflatten(tree, x)))(*leaves)
        for f in branches
    )
    return eqn.primitive.bind(index, *leaves, **eqn.params | {"branches": traced})


# An expression is the name of an array, a sum, or a number with the branches that it
# chooses. Each branch has two results.
def drawn(rng, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(ARRAYS)
    if kind < 0.45:
        return "+", drawn(rng, depth - 1), drawn(rng, depth - 1)
    several = [[drawn(rng, depth - 1) for _ in range(2)] for _ in range(BRANCHES)]
    return rng.choice(NUMBERS), rng.randrange(2), several


def computed(of, x):
    """The value of an expression."""
    match of:
        case str():
            return x[of]
        case "+", a, b:
            return computed(a, x) + computed(b, x)
        case number, result, branches:
            made = [lambda x, e=e: [computed(y, x) for y in e] for e in branches]
            return switch(x[number], made, x)[result]


def chosen(of, choice):
    """The arrays that make up the sum."""
    match of:
        case str():
            return [of]
        case "+", a, b:
            return chosen(a, choice) + chosen(b, choice)
        case number, result, branches:
            return chosen(branches[choice[number]][result], choice)


def program(of):
    """Its equations and result, the numbers by variables, the arrays by their names."""
    start = {k: jnp.int32(0) for k in NUMBERS} | {k: jnp.ones(2) for k in ARRAYS}
    jaxpr = jax.make_jaxpr(lambda x: computed(of, x))(start).jaxpr
    names = dict(zip(sorted(start), jaxpr.invars, strict=True))
    numbers = {names[k]: n for n, k in enumerate(NUMBERS)}
    eqns, (result,) = jaxprs.all_equations(jaxpr), jaxpr.outvars
    return eqns, result, numbers, {k: names[k] for k in ARRAYS}


def holds(condition, choice):
    """Whether a condition holds."""
    values = dict(enumerate(map(jnp.int32, choice.values())))
    return condition == due.ALWAYS or bool(due.holds(condition, values))


@pytest.mark.every
@pytest.mark.parametrize("seed", range(20))
def test_an_array_is_needed_where_a_branch_that_runs_reads_it(seed):
    of = drawn(random.Random(seed), 3)
    eqns, result, numbers, arrays = program(of)
    found = due.of_variables(eqns, {result: due.ALWAYS}, numbers)
    for choice in CHOICES:
        read = {k for k, x in arrays.items() if holds(found.get(x, due.NEVER), choice)}
        assert read == set(chosen(of, choice)), (of, choice)


@pytest.mark.every
@pytest.mark.parametrize("seed", range(20))
def test_a_result_is_an_operand_where_no_branch_that_runs_changes_it(seed):
    of = drawn(random.Random(seed), 2)
    eqns, result, numbers, arrays = program(of)
    found = due.kept(result, eqns, numbers, [*arrays.values()])
    made = [chosen(of, choice) for choice in CHOICES]
    alone = {x for (x, *others) in made if not others}
    if found.operand is None:
        assert found.changed == due.ALWAYS
        assert len(alone) != 1, of
        return
    (name,) = (k for k, x in arrays.items() if x is found.operand)
    for choice, each in zip(CHOICES, made, strict=True):
        # A branch that gives back one of two operands changes both.
        is_changed = holds(found.changed, choice)
        assert is_changed or each == [name], (of, choice)
        assert not is_changed or each != [name] or len(alone) > 1, (of, choice)
