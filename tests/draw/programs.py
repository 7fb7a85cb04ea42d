"""Draws programs of operations, and evaluates them for some slices of their arguments.

A program is Python: lines that a person can run. Some lines call a function with a body
of its own, inside of a loop, a conditional, ``jit`` and the like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import textwrap
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from jax import lax

import gradxform
from gradxform._jax import versions
from gradxform._slices import slices
from gradxform._slices.rules import Along
from gradxform._slices.slices import Evaluator, Kind, Missing, Policy, Slices, Source
from tests import in_numpy
from tests.draw import operations
from tests.draw.operations import Draw

NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}


@dataclasses.dataclass
class Program:
    """A function of ``x`` and ``y``, which have slices along an axis, and of ``w``.

    Attributes:
      text: it, as Python.
      args: its arguments.
      axes: the axis of the slices of ``x`` and of ``y``.
    """

    text: str
    args: dict[str, np.ndarray]
    axes: dict[str, int]
    number: int

    def __repr__(self):
        """A program that one can run."""
        args = "".join(f"{k} = jnp.array({x.tolist()})\n" for k, x in self.args.items())
        head = "\nimport jax, jax.numpy as jnp, numpy as np\nfrom jax import lax\n"
        return f"{head}{args}{self.text}print(f(x, y, w))\n# slices: {self.axes}"

    def _repr_pretty_(self, printer, cycle):
        """How hypothesis prints it."""
        del cycle
        printer.text(repr(self))

    def check(self):
        return check(self)

    @functools.cached_property
    def f(self):
        names = dict(NAMES)
        exec(self.text, names)
        return names["f"]


# Each calls ``g``, which takes and returns a value, with a body that was drawn.
WRAPPERS = {
    "jit": "jax.jit(g)({x})",
    "checkpoint": "jax.checkpoint(g)({x})",
    "jvp": "h({x})",
    "vjp": "h({x})",
    "vmap": "jax.vmap(g, in_axes={axis}, out_axes={out})({x})",
    "map": "lax.map(g, jnp.moveaxis({x}, {axis}, 0))",
    "scan": "lax.scan(lambda c, v: (c * 0.5 + g(v).sum(), g(v) + c), 0.0, "
    "jnp.moveaxis({x}, {axis}, 0), reverse={flag}, unroll={k})[{which}]",
    "scan of slices": "lax.scan(lambda c, v: (c, g(v)), 0.0, "
    "jnp.moveaxis({x}, {axis}, 0), reverse={flag})[1]",
    "cond": "lax.cond({x}.sum() > {k}, g, lambda v: g(0.5 * v), {x})",
    "cond of a number": "lax.cond({k} > jnp.sum(w) * 0, g, lambda v: g(0.5 * v), {x})",
    "cond with ones": "lax.cond(jnp.sum(w) > {k}, lambda v: jnp.ones_like(g(v)), "
    "g, {x})",
    "switch": "lax.switch(jnp.int32({k} - 1), [g, lambda v: g(v + 1)], {x})",
}
# Derivatives of their own.
RULES = {
    "jvp": "h = jax.custom_jvp(g)\n"
    "h.defjvp(lambda p, t: (g(*p), 2 * jax.jvp(g, p, t)[1]))\n",
    "vjp": "h = jax.custom_vjp(g)\n"
    "h.defvjp(lambda v: (g(v), v), lambda v, t: (3 * jnp.cos(v),))\n",
}
LOOPS = {
    "fori_loop": "lax.fori_loop(0, {k}, lambda i, v: g(v) + 0.5 * i, {x})",
    "carry": "lax.scan(lambda v, _: (g(v), v.sum()), {x}, None, length={k})[0]",
    "while": "lax.while_loop(lambda c: (c[0] < 5) & jnp.any(jnp.abs(c[1]) < 3), "
    "lambda c: (c[0] + 1, 1.5 * jnp.abs(g(c[1])) + 1), (0, {x}))[1]",
    "vmapped while": "jax.vmap(lambda v: lax.while_loop(lambda c: (c[0] < 5) & "
    "(jnp.sum(jnp.abs(c[1])) < 9), lambda c: (c[0] + 1, 1.5 * jnp.abs(g(c[1])) + 1), "
    "(0, v))[1], in_axes={axis}, out_axes={axis})({x})",
}


def typed(text, name, types):
    """The type of a value that a line makes, from those of the others."""
    body = textwrap.indent(f"{text}return {name}", "  ")
    names = dict(NAMES)
    exec(f"def line({', '.join(types)}):\n{body}", names)
    return jax.eval_shape(names["line"], *types.values())


# What JAX says of lines whose values do not fit.
_UNFIT = TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError


def lines(d, how, count, depth=0):
    """Some lines, and the name of the last value. Adds their values to ``d``."""
    text, last = "", "v"
    for k in range(count):
        new = f"v{depth}{k}"
        latest = list(d.types)[-1] if k or depth else "x"
        x = latest if d.integer(0, 2) else d.one_of(d.types)
        if not depth and how.nested and d.integer(0, 2) == 0:
            line = nested(d, how, x, new)
        else:
            expression = d.one_of(how.operations)(d, x)
            line = expression and f"{new} = {expression}\n"
        if not line:
            continue
        try:
            made = typed(line, new, d.types)
        except _UNFIT:
            continue
        if not hasattr(made, "shape") or math.prod(made.shape) > 400:
            continue
        cast = "" if made.dtype == "float64" else f"{new} = {new}.astype(float)\n"
        text += line + cast
        d.types[new], last = jax.ShapeDtypeStruct(made.shape, float), new
    return text, last


def nested(d, how, x, new):
    """A function with lines of its own, and a call of it."""
    name = d.one_of(WRAPPERS | LOOPS)
    if (axis := d.axis(x)) is None:
        return None
    inner, shape = Draw(d.integer), list(d.shape(x))
    if "axis" in (WRAPPERS | LOOPS)[name]:
        shape.pop(axis)
    inner.types["v"] = jax.ShapeDtypeStruct(tuple(shape), float)
    if name in LOOPS:  # A turn keeps the shape.
        how = dataclasses.replace(how, operations=operations.KEEP)
    text, last = lines(inner, how, d.integer(1, 3), depth=1)
    if not text:
        return None
    rank = len(inner.shape(last))
    drawn = {"out": d.integer(-rank - 1, rank), "flag": d.chance()}
    drawn |= {"k": d.integer(1, 2), "which": d.integer(0, 1)}
    call = (WRAPPERS | LOOPS)[name].format(x=x, axis=axis, **drawn)
    body = textwrap.indent(f"{text}return {last}\n", "  ")
    rule = RULES.get(name, "")
    if rule and drawn["flag"]:
        call = f"jax.grad(lambda v: jnp.sum(h(v)))({x})"
    return f"def g(v):\n{body}{rule}{new} = {call}\n"


@dataclasses.dataclass(frozen=True)
class How:
    """What a program is drawn of."""

    operations: tuple
    nested: bool = True
    length: int = 5
    alike: bool = False  # Whether `y` is like `x`.

    def drawn(self, integer):
        return program(integer, self)


FAMILIES = {
    "shapes": How(operations.SHAPES, nested=False, length=4),
    "parts": How(operations.PARTS, nested=False, length=3),
    "sums": How(operations.SUMS, nested=False, length=3),
    "rest": How(operations.REST, nested=False, length=3),
    "matrices": How(operations.MATRICES, nested=False, length=3),
    "windows": How(operations.WINDOWS, nested=False, length=2),
    "nested": How(operations.KEEP + operations.SHAPES, length=3),
    "all": How(operations.ALL),
}


def program(integer, how):
    """A program, and arguments for it; None if no line of it fits."""
    d = Draw(integer)
    number, entries = d.one_of([1, 2, 2, 3, 3, 4]), d.one_of([1, 1, 2])
    rank, axes = d.one_of([1, 2, 2, 3, 3]), {}
    for name in ("x", "y"):
        shape = [d.integer(1, 3) for _ in range(rank)]
        axes[name] = d.integer(0, rank - 1)
        if name == "y" and (how.alike or d.chance()):
            shape, axes["y"] = list(d.types["x"].shape), axes["x"]
        shape[axes[name]] = number * entries
        d.types[name] = jax.ShapeDtypeStruct(tuple(shape), float)
    d.types["w"] = jax.ShapeDtypeStruct((d.integer(1, 4), d.integer(1, 4)), float)
    with wide():
        text, _ = lines(d, how, d.integer(1, how.length))
    if not text:
        return None
    made = [name for name in d.types if name not in ("x", "y", "w")]
    body = textwrap.indent(f"{text}return {', '.join(made)},\n", "  ")
    rng = np.random.default_rng(d.integer(0, 9))
    args = {name: rng.standard_normal(d.shape(name)) for name in ("x", "y", "w")}
    return Program(f"def f(x, y, w):\n{body}", args, axes, number)


@st.composite
def programs(draw, how):
    """Those of hypothesis, which makes one that fails shorter."""
    found = how.drawn(lambda low, high: draw(st.integers(low, high)))
    return found if found else reject()


def random_programs(how, seed):
    """An endless stream of programs that ``how`` draws, the same one for each seed."""
    rng = np.random.default_rng(seed)
    while True:
        found = how.drawn(lambda low, high: int(rng.integers(low, high + 1)))
        if found:
            yield found


def telling(stream, seen):
    """Programs of a stream, each with most choices that are not in ``seen`` by then."""
    left = dict(enumerate(stream))
    while left:
        yield left.pop(max(left, key=lambda number: len(left[number].chosen - seen)))


@contextlib.contextmanager
def wide():
    """Numbers of 64 bits, so that two ways to compute one order it in the same way."""
    new = hasattr(jax, "enable_x64")
    enable = jax.enable_x64 if new else jax.experimental.enable_x64
    promotion = jax.numpy_dtype_promotion("standard")
    with enable(True), promotion, jax.numpy_rank_promotion("allow"):
        yield


def kinds_of(p, given):
    """The kinds of the arguments, if so many slices are there."""
    source = Source(p.number, given, is_complete=p.number == given == 1)

    def kind(name):
        axis = p.axes[name]
        return Kind(source, Along(axis, p.args[name].shape[axis] // p.number))

    return [kind("x"), kind("y"), None]


def part(x, kind, picks):
    """Some slices of a whole array; for no kind all of it."""
    if kind is None:
        return x
    axis, entries = kind.along
    return np.take(x, [i * entries + k for i in picks for k in range(entries)], axis)


def parts(p, kinds, picks):
    pairs = zip(p.args.values(), kinds, strict=True)
    return [part(x, kind, picks) for x, kind in pairs]


def own_sum(eqn, kinds, operands):
    """As by layers: a slice that is all is its own sum, and nothing adds up more."""
    is_all = all(kind.source.is_complete for kind in kinds if kind)
    return versions.bind(eqn, operands) if is_all else None


def by_slices(p, given, *, numbered):
    """A function of the number of the first slice, and of slices of the arguments.

    It returns slices of each result, or None. The list has the kinds of results, or
    why there is none.
    """
    kinds, found = kinds_of(p, given), []
    few = dict(enumerate(parts(p, kinds, [0] * given)))
    along = {i: kind for i, kind in enumerate(kinds) if kind}
    whole = slices.trace_whole(p.f, tuple(p.args.values()), along, few)
    refused = [] if numbered else ["random_bits"]
    policy = Policy("slice", "array", refused, own_sum, is_indexed=numbered)

    @jax.jit
    def run(first, *few):
        first = {kinds[0].source: first} if numbered else {}
        evaluator = Evaluator(policy, first=first)
        pairs = zip(few, kinds, strict=True)
        values = [Slices(x, kind) if kind else x for x, kind in pairs]
        results, made = evaluator.results(whole.closed, values), []
        found.clear()
        for x in results:
            is_there = not isinstance(x, Missing)
            kind = x.kind if isinstance(x, Slices) else None
            found.append(kind if is_there else x.reason)
            made.append(evaluator.arrays([x], [kind])[0] if is_there else None)
        return made

    return run, found


def compiled(f, *args):
    """The results of a function."""
    return jax.device_get(jax.jit(f)(*args))


def traced(f, *args):
    """The same, of the traced program, and nothing is compiled."""
    return in_numpy.jit(f)(*args)


def check(p):
    """Evaluates a program in each way; raises if a result is wrong.

    Returns how many results are refused slice by slice, and how many there are.
    """
    _, found = verdicts(p)
    return sum(isinstance(x, str) for x in found), len(found)


def verdicts(p, run_all=compiled):
    """Evaluates a program as a whole, for some slices at once, and slice by slice.

    All in one program, as compiling takes nearly all of the time. Returns for both ways
    the kind of each result, or why there is none.
    """
    rng = np.random.default_rng(0)
    some = rng.integers(0, p.number, rng.integers(1, 4)).tolist()
    ways = []  # Functions, the kinds of their results, the slices and the arguments.
    with wide():
        for picks, numbered in (
            ([some], False),
            ([[i] for i in range(p.number)], True),
        ):
            kinds = kinds_of(p, len(picks[0]))
            run, found = by_slices(p, len(picks[0]), numbered=numbered)
            given = [(pick[0], *parts(p, kinds, pick)) for pick in picks]
            ways.append((run, found, picks, given))

        def evaluated(args, given):
            runs = [run for run, *_ in ways]
            pairs = zip(runs, given, strict=True)
            return p.f(*args), [[run(*x) for x in calls] for run, calls in pairs]

        every = run_all(evaluated, [*p.args.values()], [given for *_, given in ways])
        for (_, found, picks, _), calls in zip(ways, every[1], strict=True):
            for pick, got in zip(picks, calls, strict=True):
                compare(p, pick, found, every[0], got)
    return [found for _, found, *_ in ways]


def compare(p, pick, found, wholes, results):
    for whole, got, kind in zip(wholes, results, found, strict=True):
        if got is not None:
            where = f"slices {pick} of{p!r}"
            np.testing.assert_allclose(
                got, part(whole, kind, pick), 1e-9, 1e-9, err_msg=where
            )


def refusal(error):
    """The message of an error of the package, a refusal; raises any other error."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    if not where.startswith(os.path.dirname(gradxform.__file__)):
        raise error
    return str(error)


def equations(jaxpr):
    """All equations of a jaxpr, also of those inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
            if _is_program(x):
                yield from equations(getattr(x, "jaxpr", x))


def _is_program(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")
