"""The numbers of every row of the table on large leaves, compiled as users compile.

The other tests compile with flags of ours, and nearly all of their leaves are small. A
compiler has other code for large ones: XLA's maximum on CPU drops NaN in float32 from
4,096 entries on. `.ci/large` runs this module, without those flags.
"""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests import oracles
from tests.descriptors import DESCRIPTORS
from tests.oracles import total, tree_map

if "XLA_FLAGS" not in os.environ:  # Then conftest.py has set some.
    pytest.skip("run by .ci/large", allow_module_level=True)

SHAPES = {"square": (64, 64), "one row": (1, 65_537), "flat": (300_007,)}
PLACES = ("front", "middle", "end")
VALUES = (np.nan, np.inf, -np.inf)
PUSHES = 3  # The gates of the table let some of three pushes act.
REAL, COMPLEX = ("float32", "bfloat16", "float16"), ("complex64",)
RTOL = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3, "complex64": 1e-6}


def draw(seed, is_complex):
    """Numbers that float32, bfloat16 and float16 hold exactly, in double precision."""
    rng = np.random.default_rng(seed)

    def number(shape):
        x = rng.standard_normal(shape, np.float32)
        return x.astype(jnp.bfloat16).astype(np.float16).astype(np.float64)

    return {
        k: number(shape) + 1j * number(shape) if is_complex else number(shape)
        for k, shape in SHAPES.items()
    }


def cast(tree, dtype):
    return tree_map(lambda x: x.astype(jnp.dtype(dtype)), tree)


def spoil(grads, leaf, place, value):
    """The same gradients, with this value in one place of one leaf."""
    spoiled = grads[leaf].copy()
    spoiled.flat[{"front": 0, "middle": spoiled.size // 2, "end": -1}[place]] = value
    return grads | {leaf: spoiled}


def spoiled(pushes, case):
    if case is None:
        return pushes
    push, *where = case
    return [spoil(g, *where) if t == push else g for t, g in enumerate(pushes)]


class Compiled:
    """A row's compiled update."""

    def __init__(self, row, params):
        self.params, self.tx = params, row.make()
        self.state = self.tx.init(params)

        @jax.jit
        def step(grads, state, params):
            updates, state = self.tx.update(grads, state, params, **row.extra(params))
            return updates, state, gx.apply_updates(params, updates)

        self.step = step

    def play(self, pushes):
        """The sum of all updates, in single precision."""
        params, state, trace = self.params, self.state, []
        for grads in pushes:
            updates, state, params = self.step(grads, state, params)
            trace.append(tree_map(np.asarray, updates))
        is_complex = np.iscomplexobj(trace[0]["flat"])
        return total([cast(x, COMPLEX[0] if is_complex else REAL[0]) for x in trace])


def agree(row, got, wanted, dtype, rtol, case, atol=0.0):
    """They agree up to that part of the largest number in their leaf.

    The share ``row.jumps`` of the entries may differ.
    """
    for k in SHAPES:
        finite = np.isfinite(wanted[k])
        where = f"leaf {k}, in {case[0]}, spoiled: {case[1]}"
        assert np.array_equal(np.isfinite(got[k]), finite), (
            f"{where}: other entries are finite than those of the formula in "
            f"tests/oracles.py. {row.says('rescales', 'real_only')}."
        )
        if finite.any():
            errors = np.abs(got[k] - wanted[k])[finite]
            least = PUSHES * float(jnp.finfo(dtype).smallest_subnormal)
            leaf_rtol = rtol + moved_by_others(row, finite)
            bound = leaf_rtol * np.abs(wanted[k])[finite].max() + least + atol
            few, many = row.jumps * errors.size, np.count_nonzero(errors > bound)
            assert many <= few, (
                f"{where}: {many} of {errors.size} entries differ by more than "
                f"{bound:.3g} from the formula in tests/oracles.py, by at most "
                f"{errors.max():.3g}; {few:g} may. "
                f"{row.says('jumps', 'rescales', 'real_only')}. An update that jumps "
                "with its state, as a sign does, says which share of the entries "
                "rounding may turn: jumps=1e-3. One that means nothing for complex "
                "gradients says real_only=True."
            )


def moved_by_others(row, finite):
    """By which part the entries that jump or are not finite move those of their leaf.

    At least a quarter of the entries is kept.
    """
    if not row.rescales:
        return 0.0
    return 4 * (row.jumps + np.count_nonzero(~finite) / finite.size)


class Draw:
    """Parameters and pushes in double precision, and the same in each dtype."""

    def __init__(self, dtypes):
        self.dtypes = dtypes
        trees = [draw(seed, dtypes is COMPLEX) for seed in range(PUSHES + 1)]
        self.wide, *self.of_dtype = (
            [tree if dtype is None else cast(tree, dtype) for tree in trees]
            for dtype in (None, *dtypes)
        )


@pytest.fixture(scope="module", params=[REAL, COMPLEX], ids=["real", "complex"])
def drawn(request):
    return Draw(request.param)


def cases(row, is_complex):
    """No spoiled push, then one for each leaf. Over all rows, everything meets.

    In complex gradients the leaves take turns.
    """
    number = DESCRIPTORS.index(row)
    yield None
    if row.name == "low_bit_state":
        return  # An entry that is not finite spoils its block.
    for i, leaf in enumerate(SHAPES):
        if is_complex and i != number % 3:
            continue
        push, place, value = (
            choices[(i + number // every) % 3]
            for every, choices in ((1, range(PUSHES)), (3, PLACES), (9, VALUES))
        )
        yield push, leaf, place, value


# With the oldest JAX only the first row of each factory.
FIRST = {row.name: row for row in DESCRIPTORS[::-1]}
ROWS = [
    row if FIRST[row.name] is row else pytest.param(row, marks=pytest.mark.more)
    for row in DESCRIPTORS
]


@pytest.mark.every
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_numbers(row, drawn):
    if row.real_only and drawn.dtypes is COMPLEX:
        pytest.skip("it is for real gradients")
    compiled = [Compiled(row, params) for params, *_ in drawn.of_dtype]
    for case in cases(row, drawn.dtypes is COMPLEX):
        params, *pushes = drawn.wide
        with np.errstate(invalid="ignore"):
            wanted = oracles.expected(row, params, spoiled(pushes, case))
            for dtype, one, (_, *pushes) in zip(
                drawn.dtypes, compiled, drawn.of_dtype, strict=True
            ):
                rtol = RTOL["bfloat16" if row.variant == "bf16" else dtype]
                if row.name == "low_bit_state":
                    rtol = max(rtol, 0.02)  # A step of its code is 1.6 %.
                # Updates of rounded parameters are as exact as these.
                ulp = float(jnp.finfo(dtype).eps) if row.wide_updates else 0.0
                atol = ulp * np.abs(params["flat"]).max()
                got = one.play(spoiled(pushes, case))
                agree(row, got, wanted, dtype, rtol, (dtype, case), atol)


@pytest.fixture(scope="module", params=REAL + COMPLEX)
def gradients(request):
    return cast(draw(0, request.param in COMPLEX), request.param)


def by_the_row(grads):
    """The same gradients row by row, and a padded row of NaN, which counts nowhere."""
    return tree_map(
        lambda g: gx.IndexedSlices(
            np.arange(len(g) + 1),
            np.concatenate([g, np.full_like(g[:1], np.nan)]),
            g.shape,
        ),
        grads,
    )


@pytest.mark.every
@pytest.mark.parametrize("given", [dict, by_the_row], ids=["dense", "by the row"])
def test_nan_and_inf_are_found_wherever_they_are(gradients, given):
    tx = gx.accumulate(optax.identity(), PUSHES, skip_nonfinite=True)
    state = tx.init(gradients)
    update = jax.jit(tx.update)
    server = gx.ParameterServer(
        tree_map(jnp.asarray, gradients), gx.densify(), require_finite=True
    )
    assert update(given(gradients), state)[1].nonfinite_count == 0
    assert server.push(given(gradients), 0).applied
    places = itertools.product(SHAPES, PLACES)
    for where in zip(places, itertools.cycle((*VALUES, np.inf)), strict=False):
        (leaf, place), value = where
        grads = given(spoil(gradients, leaf, place, value))
        assert update(grads, state)[1].nonfinite_count == 1, where
        with pytest.raises(ValueError, match=leaf):
            server.push(grads, 0)
    assert server.pull()[1] == 1
