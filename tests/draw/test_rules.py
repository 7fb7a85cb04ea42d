"""Programs that are drawn, evaluated for some slices and as a whole.

What is evaluated for some slices is equal, or it is refused; it is never wrong. Narrow
families find what a draw of all operations would find in hours.
"""

import collections
import itertools
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradxform._jax import versions
from gradxform._slices import rules, slices
from gradxform._slices.rules import RULES, Along
from gradxform._slices.slices import Evaluator, Kind, Missing, Policy, Slices, Source
from tests.draw import __main__, programs
from tests.draw.programs import FAMILIES


def drawn(family, count, seed=0):
    return itertools.islice(programs.random_programs(FAMILIES[family], seed), count)


@pytest.mark.every
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_those_of_the_whole(family):
    for p in drawn(family, 10 if family == "parts" else 5):
        programs.check(p)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_those_of_the_whole_in_many_programs(family):
    """Not most of them are refused, or the comparison would say nothing."""
    found = [programs.check(p) for p in drawn(family, 50, seed=1)]
    refused, results = map(sum, zip(*found, strict=True))
    assert refused < 0.6 * results


# Lines, results, and where the slices of each result lie: of some slices at once, whose
# indices nobody knows, and of each one with its index, if that differs. "." is an array
# without slices, "-" is refused, and "0/2" says that a slice has two entries.
NAMED = {
    # One array is made for two kinds of slices.
    "two axes": (
        "z = lax.broadcasted_iota(float, (3, 3), 0) + jnp.full((3, 3), 0.5)",
        "x * z, z + jnp.transpose(y)",
        *("- 1", "0 1"),
    ),
    "many readers": (
        "z = jnp.arange(3.0).reshape(3, 1) + jnp.zeros((3, 3))\n"
        + 20 * "z = z * 0.5 + z ** 2 * 0.25\n",
        "x * z, x + z, z @ w",
        *("- - .", "0 0 ."),
    ),
    # Each turn returns its input, so JAX leaves a loop that returns nothing.
    "an empty loop": (
        "z = lax.scan(lambda c, v: (c, v), 0.0, x)[1]",
        "z + y, jnp.transpose(z)",
        "0 1",
    ),
    "a part": (
        "z = jnp.arange(3.0)",
        "lax.dynamic_update_slice(x, x[:1], (1, 0)), z",
        "- .",
    ),
    "parts of other axes": (
        "i = jnp.argmax(w[0])",
        "lax.dynamic_slice(x, (0, i), (3, 1)), x[1:], x[:, ::2], "
        "lax.dynamic_update_slice(x, y[:, :2], (0, 1))",
        "0 - 0 0",
    ),
    "constants": (
        "c = np.arange(9.0).reshape(3, 3)",
        "x * c, y.T + c.T, c, x + np.ones((3, 1)), x * np.ones(3)",
        *("- - . - 0", "0 1 . 0 0"),
    ),
    "two entries": (
        "z, u = jnp.repeat(x, 2, 0), jnp.arange(6.0)[:, None] + jnp.zeros((6, 3))",
        "z, z + u, z * np.eye(6)[:, :3], z.reshape(3, 2, 3) + x[:, None], u",
        *("0/2 - - 0 .", "0/2 0/2 0/2 0 ."),
    ),
    "other sizes": (
        "",
        "x.reshape(3, 1, 3), jnp.broadcast_to(x[:, None], (3, 2, 3)), "
        "jnp.tile(x, (1, 2)), x.reshape(9), w + 1, jnp.sum(x, 1), x[None]",
        "0 0 0 0/3 . 0 1",
    ),
    # An array as short as the number of slices may be made, and read at an index.
    "short arrays": (
        "z, u = jnp.arange(3.0)[::-1], jnp.cumsum(jnp.ones((3, 3)), 0)",
        "x * z[:, None], x * u, x + jnp.cumsum(jnp.ones((3, 1)), 0)",
        *("- - -", "0 - 0"),
    ),
    "rows at indices": (
        "z = w[jnp.arange(3)]",
        "z + x, w[jnp.arange(2)] + x[:2]",
        *("- -", "0 -"),
    ),
    "a call": (
        "z = jax.jit(lambda v, u: (v + 1, jnp.cumsum(u, 0), jnp.ones((3, 3))))(x, y)",
        "z[0], z[1], z[2] + x, jax.jit(lambda v: v * 2)(w), "
        "jax.jit(lambda v: jnp.zeros((3, 3)) + v)(w[0, 0]) + x",
        "0 - 0 . 0",
    ),
    "a checkpoint": (
        "z = jax.checkpoint(lambda v, u: (v + 1, jnp.cumsum(u, 0), jnp.ones((3, 3)), u)"
        ")(x, y)",
        "z[0], z[1], z[2] + x, z[3]",
        "0 - 0 0",
    ),
    "a callback": ("jax.debug.callback(lambda w: None, w)", "x", "0"),
    "a device": ("z = jax.device_put((x, w))", "2 * z[0], z[1]", "0 ."),
    "a barrier": (
        "z = lax.optimization_barrier((x, jnp.cumsum(y, 0), w, y, jnp.ones((3, 3))))",
        "*z, x + z[4]",
        "0 - . 0 . 0",
    ),
    # The form for whole arrays of a platform is left out.
    "platforms": (
        "z = lax.platform_dependent(x, cpu=lambda v: 0 * jnp.cumsum(v, 0) + 2 * v, "
        "default=lambda v: v + v)",
        "z",
        "0",
    ),
    "an operation without a rule": (
        "z = jax.random.key_data(jax.random.wrap_key_data(jnp.ones((3, 2), 'uint32')))",
        "x[:, :2] + z",
        *("-", "0"),
    ),
    "sums of a vmap": (
        "z, u = (jax.vmap(lambda v: v - lax.psum(v, 'j'), k, k, axis_name='j')(x) "
        "for k in (0, 1))",
        "z, u",
        "- -",
    ),
    "a solve": (
        "solve = lambda _, v: v / 2\n"
        "z = jax.vmap(lambda v: lax.custom_linear_solve(lambda u: 2 * u, v, solve))(x)",
        "z",
        "0",
    ),
    # Loops.
    "a loop that each leaves": (
        "step = lambda c: (2 * jnp.abs(c[0]) + w[0], c[1] + 1)\n"
        "z = jax.vmap(lambda v: lax.while_loop(lambda c: jnp.sum(c[0]) < 9, step, "
        "(v, 0)))(x)",
        "z[0], z[1] + 0.0",
        "0 0",
    ),
    "a loop that other axes leave": (
        "z = jax.vmap(lambda v: lax.while_loop(lambda c: jnp.sum(c) < 9, "
        "lambda c: 2 * jnp.abs(c) + 1, v), 1, 1)(x)",
        "z, y",
        "- 0",
    ),
    "a loop of all": (
        "z = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * y, c[2] + x"
        ", c[3] * w[0, 0], jnp.cumsum(c[4], 0), c[5]), (0, x, jnp.zeros((3, 3)), "
        "np.ones((3, 3)), x, jnp.zeros((3, 3))))",
        "z[0] + 0.0, z[1], z[2], z[3], z[4], z[5] + x",
        ". 0 0 . - 0",
    ),
    "a loop that a sum ends": (
        "z = lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: 2 * jnp.abs(c) + 1, x)",
        "z, x",
        "- 0",
    ),
    "a scan over other axes": (
        "z = lax.scan(lambda c, v: (c + v, c * v), x[:, 0], y.T)",
        "z[0], z[1], jnp.transpose(z[1])",
        "0 1 0",
    ),
    "a scan with a sum": (
        "z = lax.scan(lambda c, v: (c + jnp.sum(v), v), 0.0, y.T)",
        "z[0], z[1]",
        "- 1",
    ),
    "a scan backwards": (
        "z = lax.scan(lambda c, v: (c + v[0], c * v[1]), jnp.ones(3), (x.T, y.T), "
        "reverse=True)",
        "z[0], z[1]",
        "0 1",
    ),
    "a scan over slices": (
        "z = lax.scan(lambda c, v: (c, (v * w[0], v[0])), 0.0, x, reverse=True)[1]",
        "z[0], z[1]",
        "0 0",
    ),
    "a scan over slices and what mixes them": (
        "z = lax.scan(lambda c, v: (c, (v[0], v[1])), 0.0, (x, jnp.cumsum(y, 0)))[1]\n"
        "u = lax.scan(lambda c, v: (c, v + c[:, 0]), jnp.cumsum(y, 0), x)[1]\n"
        "v = lax.scan(lambda c, v: (c, v), 0.0, (jnp.cumsum(y, 0) * 2, x))[1]\n"
        "a = lax.scan(lambda c, v: (c, v[0] + v[1]), 0.0, (w, x))[1]",
        "*z, u, *v, a",
        *("0 - - - 0 -", "0 - - - 0 0"),
    ),
    "a scan whose carry mixes them": (
        "z = lax.scan(lambda c, v: (jnp.cumsum(c, 0), v), x, y.T)",
        "z[0], z[1]",
        "- 1",
    ),
    "a scan with a carry of each kind": (
        "z = lax.scan(lambda c, v: ((c[0] + c[1], c[1] + v, c[2], c[3] * 0.5), "
        "(c[2], c[3])), (jnp.zeros(3), y[:, 0], 1.0, w[0]), x.T)",
        "*z[0], *z[1]",
        "0 0 . . . .",
    ),
    # Conditionals.
    "a conditional of a sum": (
        "z = lax.cond(x.sum() > 0, lambda v: v, lambda v: -v, y)",
        "z, y + 1",
        "- 0",
    ),
    "a conditional of a number": (
        "z = lax.cond(w[0, 0] > 0, lambda v: v, lambda v: -v, y)\n"
        "u = lax.switch(2, [lambda v: v, lambda v: v * 2, lambda v: jnp.zeros((3, 3))]"
        ", y)",
        "z, u",
        "0 0",
    ),
    "branches that differ": (
        "z = lax.switch(jnp.int32(w[0, 0] > 0), [lambda v: (jnp.ones((3, 3)), v, w), "
        "lambda v: (v, jnp.cumsum(v, 0), w * 2)], y)",
        "*z",
        "0 - .",
    ),
    # Functions with a derivative of their own.
    "a rule": (
        "@jax.custom_jvp\n"
        "def h(x, y):\n  return x * y, x > 0\n"
        "h.defjvp(lambda p, t: (h(*p), h(*t)))\n"
        "z, u, v = h(x, y), h(x, jnp.ones((3, 3))), h(jnp.cumsum(x, 0), y)",
        "z[0], z[1] + 0.0, u[0], v[0], h(w, w)[0], h(np.ones((3, 3)), x)[0], "
        "h(jnp.ones((3, 3)), w)[0], h(x, jnp.ones(3))[0], h(jnp.arange(3.0), x.T)[0]",
        *("0 0 0 - . - . 0 -", "0 0 0 - . 0 . 0 1"),
    ),
}
ONLY = {
    "an only slice": (
        "c = np.ones((1, 3))",
        "x * c, x + c + jnp.ones((1, 3)), jnp.arange(1.0)[:, None] + x, jnp.sum(x, 0), "
        "jnp.cumsum(x, 0), jnp.concatenate([x, c], 1)",
        *("0 0 0 - - 0", "0 0 0 . . 0"),
    ),
}


def place(kind):
    """Where slices lie, as the tables have it."""
    if kind is None or isinstance(kind, str):
        return "-" if kind else "."
    axis, entries = kind.along
    return f"{axis}/{entries}" if entries > 1 else str(axis)


def found_in(name):
    """Where the slices of the results of a program lie, both ways, as in the tables."""
    first, results, *_ = (NAMED | ONLY)[name]
    body = textwrap.indent(f"{first}\nreturn {results},\n", "  ")
    rng, number = np.random.default_rng(0), 1 if name in ONLY else 3
    args = {key: rng.standard_normal((number, 3)) for key in ("x", "y", "w")}
    p = programs.Program(f"def f(x, y, w):\n{body}", args, {"x": 0, "y": 0}, number)
    found = programs.verdicts(p, programs.traced)
    return [" ".join(map(place, kinds)) for kinds in found]


@pytest.mark.every
@pytest.mark.parametrize("name", NAMED | ONLY)
def test_slices_of_a_program_by_name(name):
    """They are those of the whole, in NumPy."""
    _, _, some, *each = (NAMED | ONLY)[name]
    assert found_in(name) == [some, *(each or [some])]


def test_no_array_leaks_from_the_trace_of_a_turn():
    with jax.checking_leaks():
        found_in("a scan with a carry of each kind")


def test_a_debugger_sees_the_slices():
    """As each layer is shown; a compiled evaluation refuses to show some of them."""
    seen, kind = [], Kind(Source(3, 1), Along(0))

    def f(x):
        jax.debug.callback(seen.append, 2 * x)

    whole = slices.trace_whole(f, (jnp.ones((3, 2)),), {0: kind}, {0: jnp.ones((1, 2))})
    evaluator = Evaluator(Policy("slice", "array", (), programs.own_sum))
    part = [Slices(jnp.ones((1, 2)), kind)]
    with pytest.raises(slices.MixedSlicesError, match="may mix slices, by 'debug_call"):
        evaluator.results(whole.closed, part)
    with jax.disable_jit():
        evaluator.results(whole.closed, part)
    jax.effects_barrier()
    assert [x.tolist() for x in seen] == [[[2, 2]]]


def test_a_derivative_is_that_of_the_whole_program():
    """Its rule is another one than that of its operations; an integer has none."""
    text = (
        "@jax.custom_jvp\n"
        "def h(x, w):\n  return x * w[0], jnp.argmax(x, 1), jnp.sum(w)\n"
        "h.defjvp(lambda p, t: (h(*p), (3 * t[0], np.zeros(3, jax.dtypes.float0), "
        "jnp.sum(5 * t[1]))))\n"
        "def f(x, y, w):\n"
        "  z, k, s = h(x * y, w)\n"
        "  return z + k[:, None], jnp.cos(z) * s\n"
    )
    rng = np.random.default_rng(0)
    args = {key: rng.standard_normal((3, 3)) for key in ("x", "y", "w")}
    moved = {key: rng.standard_normal((3, 3)) for key in ("x", "y", "w")}
    p = programs.Program(text, args, {"x": 0, "y": 0}, 3)
    with programs.wide():
        run, _ = programs.by_slices(p, 1, numbered=True)
        kinds = programs.kinds_of(p, 1)
        pair = [*args.values()], [*moved.values()]
        _, wanted = programs.traced(lambda *x: jax.jvp(p.f, *x), *pair)
        for i in range(3):
            parts = [
                [programs.part(x, kind, [i]) for x, kind in zip(xs, kinds, strict=True)]
                for xs in pair
            ]
            _, got = programs.traced(
                lambda *x, i=i: jax.jvp(lambda *x: run(i, *x), *x), *parts
            )
            for x, y in zip(got, wanted, strict=True):
                np.testing.assert_allclose(x, y[i : i + 1], rtol=1e-12)


def test_sums_over_a_mesh_axis_are_sums_of_slices():
    """Each result is one of the operands, summed on its own; a mix stays one."""

    def f(x, w):
        ones, mixed = jnp.ones((3, 2)), jnp.cumsum(x, 0)
        return (
            *lax.psum((x, w, mixed), "i"),
            lax.pmax(x, "i"),
            x + lax.psum(ones, "i"),
        )

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 2)), rng.standard_normal((2, 4))
    source = Source(3, 1)
    kind = Kind(source, Along(0))
    found = []

    def run(i, part, x, w):
        whole = slices.trace_whole(f, (x, w), {0: kind}, {0: part, 1: w})
        policy = Policy("slice", "array", refused, lambda *_: None)
        evaluator = Evaluator(policy, first={source: i})
        results = evaluator.results(whole.closed, [Slices(part, kind), w])
        found[:] = [
            getattr(x, "kind", None) or getattr(x, "reason", "") for x in results
        ]
        return [getattr(x, "array", x) for x in results if not isinstance(x, Missing)]

    def in_numpy(f, axes, *args):
        with programs.wide():
            mapped = jax.vmap(f, axes, axis_name="i")
            return jax.tree.leaves(programs.traced(mapped, *args))

    refused = ()
    whole = in_numpy(f, 0, x, w)
    for i in range(3):
        got = in_numpy(run, (None, 0, 0, 0), i, x[:, i : i + 1], x, w)
        assert found == [kind, "", found[2], kind, kind]
        assert re.match("its update may mix slices, by 'cumsum'", found[2])
        wanted = [
            whole[0][:, i : i + 1],
            whole[1],
            *(y[:, i : i + 1] for y in whole[3:]),
        ]
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    refused = versions.OVER_MESH
    with pytest.raises(slices.MixedSlicesError, match="may mix slices, by 'psum'"):
        in_numpy(run, (None, 0, 0, 0), 0, x[:, :1], x, w)


@pytest.mark.parametrize("number", [1, 2])
def test_a_broadcast_of_an_axis_makes_other_slices(number):
    """One slice becomes four entries, or an axis in front of them."""
    text = "def f(x, y, w):\n  return {} * 2, jnp.broadcast_to(x, (4, *x.shape)) + 1\n"
    four = f"jnp.broadcast_to(x, (4, {number}, 3))"
    args = {key: np.ones((number, 3)) for key in ("x", "y", "w")}
    if number == 1:
        four = "lax.broadcast_in_dim(x, (4, 3), (0, 1))"
    programs.check(programs.Program(text.format(four), args, {"x": 0, "y": 0}, number))


@pytest.mark.slow
def test_a_hunt_finds_what_is_wrong(monkeypatch, capsys):
    """With the rule of a transposition broken."""
    turned = rules.Rule.of(lambda eqn, operand, along, number: along, "permutation")
    monkeypatch.setitem(RULES, "transpose", turned)
    monkeypatch.setattr(__main__, "FAMILIES", FAMILIES)
    monkeypatch.setattr(__main__, "shortest", lambda how: None)
    monkeypatch.setattr("sys.argv", ["draw", "--minutes", "1", "--seed", "3"])
    with pytest.raises(SystemExit, match="1"):
        __main__.main()
    assert "print(f(x, y, w))" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["draw", "--minutes", "0.01"])
    __main__.main()
    assert "none is wrong" in capsys.readouterr().out


# Never drawn: which operation, and which parameter of one.

NOT_DRAWN = {
    *versions.ELEMENTWISE,  # See below.
    *versions.SAME_VALUES,  # On meshes, in the tests of layers and of tables.
    "geqrf",  # A part of `qr` on some platforms.
    "stack",  # JAX before 0.12 has none.
    "unstack",
}
# Parameters with one value on one device, or one for each operation. A `top_k` that
# is not stable may order equal numbers in two ways.
ONE_VALUE = {
    *("out_sharding", "sharding", "dtype", "preferred_element_type", "computation"),
    *("update_jaxpr", "update_consts", "num_carry", "num_consts", "linear", "ft_out"),
    *("_split_transpose", "bit_width", "index_dtype", "jaxpr", "k", "is_stable"),
    *("aggregate_to_topk", "consts", "perturb_singular"),
}


@pytest.mark.slow
def test_each_operation_and_each_parameter_is_drawn(monkeypatch):
    """And each operation runs on slices at least once."""
    found, runs = collections.defaultdict(lambda: collections.defaultdict(set)), set()

    def resized(name, *args):
        runs.add(name)
        return rules.resized(name, *args)

    monkeypatch.setattr(slices, "resized", resized)
    rare = {"matrices": 600, "windows": 600}  # Of many parameters.
    streams = (drawn(family, rare.get(family, 250), seed=2) for family in FAMILIES)
    for p in itertools.chain(*streams):
        with programs.wide():
            program = jax.make_jaxpr(p.f)(*p.args.values())
            run, _ = programs.by_slices(p, 1, numbered=True)
            few = programs.parts(p, programs.kinds_of(p, 1), [0])
            jax.eval_shape(run, 0, *few)
        for eqn in programs.equations(program.jaxpr):
            for name, value in {"": "", **eqn.params}.items():
                found[eqn.primitive.name][name].add(str(value))
    assert RULES.keys() - found.keys() <= NOT_DRAWN
    assert versions.Op.LINEAR_SOLVE in found
    by_entries = versions.ELEMENTWISE | versions.SAME_VALUES
    assert found.keys() & RULES.keys() - runs - by_entries <= {"random_bits"}
    for name in RULES.keys() & found.keys() - versions.ELEMENTWISE:
        rule, parameters = RULES[name], dict(found[name])
        del parameters[""]
        if rule.reads is not None:
            assert parameters.keys() <= rule.reads | versions.NO_PLACES, name
            one = {k for k, x in parameters.items() if len(x) < 2}
            assert one <= ONE_VALUE, name


def test_a_parameter_that_no_rule_knows_is_refused():
    """As one that a later JAX has."""

    def f(x):
        return lax.rev(x, (1,)), lax.transpose(x, (1, 0)), jnp.sin(x)

    (rev, turned, sine) = jax.make_jaxpr(f)(jnp.ones((2, 3))).jaxpr.eqns
    along = Along(0)
    for eqn, wanted in ((rev, along), (turned, Along(1)), (sine, along)):
        name = eqn.primitive.name
        assert rules.after(name, eqn, 0, along, 2) == wanted
        other = eqn.replace(params=eqn.params | {"by_another_order": True})
        is_elementwise = eqn is sine
        got = rules.after(name, other, 0, along, 2)
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
