"""Programs that are drawn, evaluated for some slices and as a whole.

What is evaluated for some slices is equal, or it is refused; it is never wrong. Narrow
families find what a draw of all operations would find in hours.
"""

import collections

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradxform._jax import versions
from gradxform._slices import rules
from gradxform._slices.rules import RULES, Along
from tests.draw import operations, programs
from tests.draw.programs import How

FAMILIES = {
    "shapes": How(operations.SHAPES, nested=False, length=4),
    "parts": How(operations.PARTS, nested=False, length=3),
    "sums": How(operations.SUMS, nested=False, length=3),
    "rest": How(operations.REST, nested=False, length=3),
    "nested": How(operations.KEEP + operations.SHAPES, length=3),
    "all": How(operations.ALL),
}


def drawn(how, count, f):
    """Calls ``f`` with so many programs, the same ones each time."""

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs.programs(how))
    def call(p):
        f(p)

    call()


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_those_of_the_whole(family):
    drawn(FAMILIES[family], 12, programs.check)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_those_of_the_whole_in_many_programs(family):
    """Not most of them are refused, or the comparison would say nothing."""
    counts = collections.Counter()

    def check(p):
        refused, results = programs.check(p)
        counts.update(refused=refused, results=results)

    drawn(FAMILIES[family], 150, check)
    assert counts["refused"] < 0.6 * counts["results"]


# Never drawn: which operation, and which parameter of one.

NOT_DRAWN = {
    *versions.ELEMENTWISE,  # See below.
    *versions.SAME_VALUES,  # On meshes, in the tests of layers and of tables.
    "geqrf",  # A part of `qr` on some platforms.
    "stack",  # JAX before 0.12 has none.
    "unstack",
}
# Parameters that have one value on one device, or one for each operation.
ONE_VALUE = {
    *("out_sharding", "sharding", "dtype", "preferred_element_type", "computation"),
    *("update_jaxpr", "update_consts", "num_carry", "num_consts", "linear", "ft_out"),
    *("_split_transpose", "bit_width", "index_dtype", "k"),
}


@pytest.mark.slow
def test_each_operation_and_each_parameter_is_drawn():
    found = collections.defaultdict(lambda: collections.defaultdict(set))

    def note(p):
        with programs.wide():
            program = jax.make_jaxpr(p.f)(*p.args.values())
        for eqn in programs.equations(program.jaxpr):
            for name, value in eqn.params.items():
                found[eqn.primitive.name][name].add(str(value))
            found[eqn.primitive.name][""].add("")

    # Each function alone: among others its last choices may never be drawn.
    for operation in operations.ALL:
        drawn(How((operation,), nested=False, length=3), 120, note)
    drawn(FAMILIES["nested"], 150, note)
    assert RULES.keys() - found.keys() <= NOT_DRAWN
    for name in RULES.keys() & found.keys() - versions.ELEMENTWISE:
        rule, parameters = RULES[name], dict(found[name])
        del parameters[""]
        if rule.reads is not None:
            known = rule.reads | versions.NO_PLACES
            assert parameters.keys() <= known, name
            one = {k for k, x in parameters.items() if len(x) < 2}
            assert one <= ONE_VALUE, name


def test_a_parameter_that_no_rule_knows_is_refused():
    """As one that a later JAX has."""

    def f(x):
        return lax.rev(x, (1,)), lax.transpose(x, (1, 0)), jnp.sin(x)

    (rev, turned, sine) = jax.make_jaxpr(f)(jnp.ones((2, 3))).jaxpr.eqns
    along = Along(0)
    for eqn, wanted in ((rev, along), (turned, Along(1)), (sine, along)):
        assert rules.after(eqn, 0, along, 2) == wanted
        other = eqn.replace(params=eqn.params | {"by_another_order": True})
        is_elementwise = eqn is sine
        got = rules.after(other, 0, along, 2)
        assert got == (along if is_elementwise else None)


# Operations by entries.

PARAMETERS = {
    "bitcast_convert_type": {"new_dtype": np.dtype("int32")},
    "conj": {"input_dtype": np.dtype("complex64")},
    "convert_element_type": {
        "new_dtype": np.dtype("float32"),
        "weak_type": False,
        "sharding": None,
    },
    "integer_pow": {"y": 3},
    "mul": {"out_dtype": None},
    "reduce_precision": {"exponent_bits": 8, "mantissa_bits": 4},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
}
ACCURATE = "cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh"
PARAMETERS |= {name: {"accuracy": None} for name in ACCURATE.split()}
# These need names of axes, or are calls of others.
OTHERS = {"copy_p", "name", "pcast", "polynomial", "pvary"}


def called(operation, name, args):
    """The result for some arguments; None if they are not what it takes."""
    known = PARAMETERS.get(name, {})
    try:
        (made,) = jax.tree.leaves(operation.bind(*map(jnp.asarray, args), **known))
    except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError):
        return None
    return np.asarray(made)


@pytest.mark.parametrize("name", sorted(versions.ELEMENTWISE - OTHERS))
def test_an_operation_acts_on_each_entry(name):
    """In another order of the entries it gives the same results in that order."""
    operation = getattr(lax, f"{name}_p", None)
    if operation is None:
        pytest.skip("This JAX has another one.")
    rng = np.random.default_rng(0)
    real = rng.uniform(0.1, 0.9, (3, 4, 5)).astype("float32")
    wholes = rng.integers(1, 9, (3, 4, 5)).astype("int32")
    kinds = [real, wholes, wholes > 4, (real + 1j * real[::-1]).astype("complex64")]
    order, results = rng.permutation(5), 0
    for x in kinds:
        for count in (1, 2, 3):
            args = [np.sort(x, 0)[k] for k in range(count)]
            if name == "select_n":
                args[0] = wholes[0] > 4
            want = called(operation, name, args)
            if want is not None:
                got = called(operation, name, [a[:, order] for a in args])
                np.testing.assert_array_equal(got, want[:, order])
                assert want.shape == (4, 5)
                results += 1
    assert results or name in ("exp2", "log2"), name
