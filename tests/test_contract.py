"""What every transformation promises, for every row of the descriptor table."""

import collections
import contextlib
import copy
import cProfile
import dataclasses
import functools
import inspect
import math
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._gates.gate import gate_of
from tests import in_numpy, oracles
from tests.descriptors import DESCRIPTORS, UNGATED, factory

COMPLEX = ("complex64", "complex128")


@pytest.fixture(scope="module", params=DESCRIPTORS, ids=str)
def row(request):
    """Scoped to the module: the tests of a row run together, and share its programs."""
    return request.param


class Compiled:
    """A row's compiled update, and three steps of it on the draw of most tests."""

    def __init__(self, row):
        self.row, self.tx = row, row.make()
        traces = 0

        @jax.jit
        def update(grads, state, params, **extra):
            nonlocal traces
            traces += 1
            return self.tx.update(grads, state, params, **extra)

        self.update = update
        self.trace = self.run(draw(1), draw(0))
        self.traces = traces

    def run(self, grads, params, steps=3):
        return run(self.row, grads, params, self.update, steps)

    def as_one(self):
        """The row, whose update runs compiled where jit is disabled."""

        def update(grads, state, params, **extra):
            with jax.disable_jit(False):
                return self.update(grads, state, params, **extra)

        return optax.GradientTransformationExtraArgs(self.tx.init, update)


compiled_once = functools.lru_cache(maxsize=1)(Compiled)


@pytest.fixture
def compiled(row):
    return compiled_once(row)


def in_turn(turn):
    """A test that is dear has each factory's first row; its other rows take turns."""
    chosen, seen = [], collections.Counter()
    for row in DESCRIPTORS:
        if seen[row.name] % 4 == turn or not seen[row.name]:
            chosen.append(row)
        seen[row.name] += 1
    return pytest.mark.parametrize("row", chosen, ids=str, scope="module")


def number(rng, shape, dtype):
    x = rng.standard_normal(shape)
    if dtype in COMPLEX:
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(np.asarray(x, jnp.dtype(dtype)))


def draw(seed, *dtypes):
    """A tree with a tensor, a scalar and an empty node; the dtypes take turns."""
    rng = np.random.default_rng(seed)
    w, b = (dtypes * 2)[:2] or ("float32", "float32")
    return {
        "w": number(rng, (2, 3, 2), w),
        "nested": [None, {"b": number(rng, (), b)}],
    }


def draw_of_two_kinds(row, seed):
    """A tree in half and in double precision, complex if the row allows that."""
    rng = np.random.default_rng(seed)
    double = "float64" if row.real_only else "complex128"
    return {"half": number(rng, (2, 3, 2), "bfloat16"), "*": number(rng, (3,), double)}


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), tree)


def run(row, grads, params, update=None, steps=3, **unknown):
    tx = row.make()
    update = update or tx.update
    state = tx.init(params)
    trace = []
    for _ in range(steps):
        updates, state = update(grads, state, params, **row.extra(params), **unknown)
        trace.append((updates, state))
    return trace


def flat(tree):
    """The numbers of a draw, as the oracles take them."""
    leaves = {"w": tree["w"], "b": tree["nested"][1]["b"]}
    return {k: np.asarray(x, np.float64) for k, x in leaves.items()}


def test_the_numbers_are_those_of_the_formula(row, compiled):
    """Of its oracle in float64. test_large_leaves.py has further leaves and dtypes."""
    assert_formula(row, compiled.update)


WITH_A_RATE = {row.name: row for row in DESCRIPTORS if "learning_rate" in row.kwargs}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_A_RATE)
def test_a_schedule_is_read_at_the_count_of_the_step(name):
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    kwargs = WITH_A_RATE[name].kwargs | {"learning_rate": schedule}
    row = dataclasses.replace(WITH_A_RATE[name], kwargs=kwargs)
    assert_formula(row, row.make().update)


def few_numbers(seed):
    """Equal entries, negative zeros, and sums and means that are exactly 0."""
    rng = np.random.default_rng(seed)

    def entries(x):
        found = rng.choice(np.float32([-1, -0.5, -0.0, 0, 0.5, 1]), np.shape(x))
        return jnp.asarray(found, x.dtype)

    return jax.tree.map(entries, draw(seed))


def one_is_tiny(seed):
    """One leaf is so small that the product of two of its numbers is 0."""
    tiny = jax.tree.map(lambda b: 1e-22 * b, draw(seed)["nested"])
    return draw(seed) | {"nested": tiny}


@pytest.mark.parametrize("draw", [few_numbers, one_is_tiny])
def test_the_numbers_are_those_of_the_formula_for(draw, row, compiled):
    """Random numbers never meet a momentum of 0, a tie or a product too small."""
    assert_formula(row, compiled.update, draw)


@pytest.mark.slow
@in_turn(1)
def test_gradients_of_less_precision_round_no_state(row):
    """A momentum in their dtype would be wrong by a part in 500."""
    tx, params, grads = row.make(), draw(0), draw(1, "bfloat16")
    _, state = tx.update(grads, tx.init(params), params, **row.extra(params))
    wanted = oracles.after(row, flat(params), [flat(grads)])[1:]
    got = [flat(optax.tree.get(state, field)) for field in row.kept()]
    # A clip in front is a link, which rounds as any other.
    is_clipped = row.name in ("adagrad", "ftrl") and "clip" in row.variant
    for ours, theirs in zip(got[: len(wanted)], wanted, strict=True):
        rtol = 1e-2 if row.variant == "bf16" or is_clipped else 1e-5
        for k in theirs:
            atol = rtol * np.abs(theirs[k]).max()
            np.testing.assert_allclose(ours[k], theirs[k], rtol=0, atol=atol)


def assert_formula(row, update, draw=draw):
    """The sums of its updates, and its state, follow the oracle for three pushes."""
    start = params = draw(0)
    pushes = [draw(1 + t) for t in range(3)]
    state, summed = row.make().init(params), {"w": 0.0, "b": 0.0}
    for n, grads in enumerate(pushes, 1):
        updates, state = update(grads, state, params, **row.extra(params))
        params = optax.apply_updates(params, updates)
        summed = {k: summed[k] + u for k, u in flat(updates).items()}
        wanted = oracles.after(row, flat(start), [*map(flat, pushes[:n])])
        got = {"all updates": summed}
        if len(wanted) > 1:  # It keeps a state, and a push has acted.
            got |= {k: flat(optax.tree.get(state, k)) for k in row.kept()}
        if len(got) != len(wanted):
            pytest.fail(
                f"the formula in tests/oracles.py yields {len(wanted) - 1} fields of "
                f"the state of {row}, and KEPT in tests/descriptors.py names "
                f"{[*got][1:]}."
            )
        for (part, ours), theirs in zip(got.items(), wanted, strict=True):
            for k in theirs:
                rtol = 1e-2 if row.variant == "bf16" else 1e-5
                size = np.abs(theirs[k]).max()
                if row.sets_params:  # Its update is a difference of parameters.
                    size = max(size, np.abs(flat(params)[k]).max())
                least = np.finfo(np.float32).tiny
                # The square of a smaller norm is 0.
                least = np.sqrt(least) if "norms" in row.kept() else least
                atol = max(rtol * size, least)
                what = f"{part} of leaf {k}, after push {n}. {row.says('sets_params')}"
                np.testing.assert_allclose(
                    ours[k], theirs[k], rtol=0, atol=atol, err_msg=what
                )


def test_only_a_row_that_reads_params_needs_them(row):
    grads, tx = draw(1), row.make()
    state, extra = tx.init(draw(0)), row.extra(draw(0))

    def update(grads, state):
        return tx.update(grads, state, **extra)

    error = error_of(jax.eval_shape, update, grads, state)
    assert bool(error) == row.reads_params, f"{row.says('reads_params')}, but: {error}"
    assert not error or "needs params" in error


def test_init_and_update_tell_what_functions_tell(row):
    """Tools that wrap a function, or show it, ask for these."""
    tx = row.make()
    for part, first in ("init", "params"), ("update", "updates"):
        function = getattr(tx, part)
        assert function.__name__ in (f"{part}_fn", "<lambda>")
        assert function.__qualname__.endswith(f".<locals>.{function.__name__}")
        module = sys.modules[function.__module__].__name__
        assert module.startswith(("gradxform", "optax"))
        assert next(iter(inspect.signature(function).parameters)) in (first, "_")


# A row of each kind of gate.
GATES = {row.name: row for row in DESCRIPTORS if row not in UNGATED}


@pytest.mark.slow
@pytest.mark.parametrize("row", GATES.values(), ids=str)
def test_a_gates_update_can_be_wrapped_named_timed_and_sent(row):
    cloudpickle = pytest.importorskip("cloudpickle")
    tx, params = row.make(), {"w": jnp.arange(6.0).reshape(2, 3)}
    given, extra = (params, tx.init(params), params), row.extra(params)
    expected = jax.jit(tx.update)(*given, **extra)
    profile = cProfile.Profile()
    sent = cloudpickle.loads(cloudpickle.dumps(tx.update))
    for again in (
        jax.named_call(tx.update),
        jax.profiler.annotate_function(tx.update),
        functools.partial(profile.runcall, tx.update),
        copy.deepcopy(tx.update),
        sent,
    ):
        got = jax.jit(again)(*given, **extra)
        chex.assert_trees_all_close(got, expected, rtol=1e-6)
    codes = (getattr(entry.code, "co_name", "") for entry in profile.getstats())
    assert tx.update.__name__ in codes
    lowered = jax.jit(jax.named_call(tx.update)).lower(*given, **extra)
    assert f"/{tx.update.__name__}/" in lowered.as_text(debug_info=True)
    assert gate_of(tx._replace(update=sent)) is not None


@contextlib.contextmanager
def for_complex(row, dtype):
    """An error in it names the field that a row for real gradients has."""
    try:
        yield
    except Exception as error:
        if dtype in COMPLEX:
            error.add_note(
                f"{row.says('real_only')}. If its update means nothing for complex "
                "gradients, it says real_only=True."
            )
        raise


@pytest.mark.parametrize("dtype", ["float16", "complex64"])
def test_types_are_stable(row, dtype):
    """Eager steps, and donated ones, have types in the other dtypes."""
    if row.real_only and dtype in COMPLEX:
        pytest.skip("it is for real gradients")

    def step(params, grads):
        state = tx.init(params)
        assert types(state) == expected
        updates, state = tx.update(grads, state, params, **row.extra(params))
        said = row.says("sets_params", "wide_updates")
        assert types(updates) == types(row.like_updates(grads, params)), said
        assert types(state) == expected

    params, grads, tx = draw(0, dtype)["w"], draw(1, dtype)["w"], row.make()
    expected = types(tx.init(params))
    for field, wanted in row.kept(dtype).items():
        named = f"{field}, by KEPT in tests/descriptors.py"
        assert optax.tree.get(tx.init(params), field).dtype == wanted, named
    with for_complex(row, dtype):
        jax.eval_shape(step, params, grads)


def skip_if_wide(row):
    if row.wide_updates:
        pytest.skip("in half precision it is another step: test_half_precision.py")


@pytest.mark.slow
@in_turn(3)
def test_eager_equals_jit(row, compiled):
    with jax.enable_x64(True):
        params, grads = draw_of_two_kinds(row, 0), draw_of_two_kinds(row, 1)
        eager = run(row, grads, params, steps=1, unknown=1.0)  # To every row.
        jitted = compiled.run(grads, params, steps=1)
        for updates, state in eager + jitted:
            assert types(updates) == types(row.like_updates(grads, params))
            assert types(state) == types(compiled.tx.init(params))
    leaves = zip(jax.tree.leaves_with_path(eager), jax.tree.leaves(jitted), strict=True)
    for (path, got), expected in leaves:
        where = jax.tree_util.keystr(path)
        # XLA keeps more precision inside a fusion than half-precision arrays hold.
        rtol = 2e-2 if row.variant == "bf16" or "half" in where else 2e-6
        np.testing.assert_allclose(
            *(np.asarray(x).astype(complex) for x in (got, expected)),
            rtol=rtol,
            atol=rtol / 10,
            err_msg=where,
        )


def test_state_is_strongly_typed_for_all_params(row):
    def update(weak):
        assert jax.typeof(weak).weak_type
        assert types(tx.init(weak)) == types(state)
        return tx.update(np.float32(1), state, weak, **row.extra(weak))[1]

    tx, weak = row.make(), jnp.asarray(2.0)
    state = tx.init(weak)
    for leaf in jax.tree.leaves([state, jax.eval_shape(update, weak)]):
        assert not leaf.weak_type


def test_params_may_be_no_more_than_described(row):
    params = draw(0)
    described = jax.eval_shape(lambda: params)
    state = row.make().init(described)
    expected = row.make().init(params)
    assert types(state) == types(expected)
    chex.assert_trees_all_equal(state, expected)


def test_gradients_may_be_of_another_precision(row):
    params, grads = draw(0, "bfloat16", "float32"), draw(1, "float32", "bfloat16")
    state = row.make().init(params)

    @functools.partial(jax.eval_shape, params=params, grads=grads)
    def _(params, grads):
        updates, new_state = row.make().update(
            grads, state, params, **row.extra(params)
        )
        assert types(updates) == types(row.like_updates(grads, params))
        assert types(new_state) == types(state)
        assert types(gx.apply_updates(params, updates)) == types(params)


# Their counts begin again, or end at a number that their arguments say.
BOUNDED = (
    "clip_by_zscore",
    "delayed",
    "delayed_nesterov",
    "skip_spikes",
    "worker_mean",
)


def test_counts_end_at_the_largest_number(row):
    """After 2³¹ steps they would otherwise be negative."""
    if any(name.removeprefix("scale_by_") in BOUNDED for name in row.factories()):
        pytest.skip("its counts never come there")
    largest, params, tx = np.int32(2**31 - 1), draw(0), row.make()

    def full(x):
        return jnp.full_like(x, largest) if x.dtype == jnp.int32 else x

    extra = {
        k: largest if k == "local_step" else v for k, v in row.extra(params).items()
    }
    state = jax.tree.map(full, tx.init(params))
    _, state = tx.update(draw(1), state, params, **extra)
    for x in jax.tree.leaves(state):
        assert x.dtype != jnp.int32 or jnp.all(x >= 0)


def test_second_call_does_not_retrace(compiled):
    assert compiled.traces == 1


FIRST_PROGRAMS = {
    "gate": """
tx = gx.drop_stale(gx.adagrad(0.1), 1)
step = jax.jit(lambda p, s: gx.apply_gradients(tx, f(p) * p, s, p, local_step=0))""",
    "tables": """
tx = gx.adagrad(0.1)
step = gx.minimize(f, tx, tables=[""], donate=False)""",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", FIRST_PROGRAMS.values(), ids=FIRST_PROGRAMS)
def test_the_first_program_of_a_process_is_traced_once(program):
    """An import during the trace can change what the trace depends on."""
    program = f"""
import gradxform as gx, jax
traces = []
def f(table):
    traces.append(0)
    return gx.lookup(table, [0])[0]
{program}
params = jax.numpy.ones(2)
params, state, *_ = step(params, tx.init(params))
once = len(traces)
step(params, state)
assert len(traces) == once
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_state_and_params_can_be_donated(row):
    """The lowered program says so. JAX warns where it cannot use a donated array.

    Nothing is sent to a device while it is traced.
    """
    tx, params, grads = row.make(), draw(0), draw(1)
    state, extra = tx.init(params), jax.tree.map(jnp.asarray, row.extra(params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads, extra):
        after = gx.apply_gradients(tx, grads, state, params, **extra)
        assert types(after) == types((params, state))  # The next step takes it, too.
        return after

    with jax.transfer_guard("disallow"):
        lowered = step.lower(params, state, grads, extra)
    in_place = re.findall(r"tf.aliasing_output = (\d+)", lowered.as_text())
    assert set(map(int, in_place)) >= set(range(len(jax.tree.leaves(params))))
    # One buffer cannot be donated twice.
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    assert len(buffers) == len(set(buffers))


def static(row):
    """The arguments of a row that decide what is computed, and no number does."""
    shapes = "accumulator_dtype", "mu_dtype", "num_steps", "num_workers", "window"
    shapes += "bits", "block_size", "min_size", "block_axis"
    values = {k: p.default for k, p in row.parameters().items()} | row.kwargs
    return [k for k, v in values.items() if callable(v) or (k in shapes and v)]


@in_turn(0)
def test_inject_hyperparams(row, compiled, standard_promotion):
    """Inside, every number is a traced float32. It widens no gradient in half."""
    skip_if_wide(row)
    tx = optax.inject_hyperparams(factory(row.name), static_args=static(row))(
        **row.arguments()
    )
    # Its numbers have the widest dtype of the parameters.
    params, grads = draw(0, "bfloat16", "float32"), draw(1, "float16", "float32")
    state = tx.init(params)
    update = in_numpy.jit(tx.update)
    atol = 1e-4 if row.sets_params else 1e-6  # Its state is a difference.
    # The same in float32, with numbers that are constants.
    for expected in compiled.run(wide(grads), wide(params)):
        updates, state = update(grads, state, params, **row.extra(params))
        numbers = [x for x in state.hyperparams.values() if x.dtype != jnp.int32]
        assert all(x.dtype == jnp.float32 for x in numbers)
        assert types(updates) == types(row.like_updates(grads, params))
        got = updates, state.inner_state
        chex.assert_trees_all_close(wide(got), wide(expected), rtol=1e-2, atol=atol)
        # What is in single precision all the way.
        single = updates["nested"], expected[0]["nested"]
        chex.assert_trees_all_close(*single, rtol=1e-5)


def test_inject_hyperparams_without_static_args(row):
    """Every number is traced, or an error says that it cannot be."""
    must_be = {*static(row)} - {"max_staleness"}  # That may be a schedule.
    tx = optax.inject_hyperparams(factory(row.name))(**row.arguments())
    fails = pytest.raises((TypeError, ValueError), match="static_args")
    with fails if must_be else contextlib.nullcontext():
        check_traced_types(row, tx, draw(1), draw(0))


def around(interval):
    """Numbers at, above and below both ends of a range, with whether they are in it."""
    form = r"(integers in )?([\[(])(.*), (.*)([\])])"
    whole, opened, low, high, closed = re.fullmatch(form, interval).groups()
    low, high = float(low), float(high)
    for end, bracket, inside in (low, opened, 1), (high, closed, -1):
        yield end, bracket in "[]"
        if math.isinf(end):  # On the other side of it is nothing.
            yield -inside * float(jnp.finfo(jnp.float32).max), True
            continue
        for side in (1, -1):
            beside = end + side if whole else np.nextafter(end, side * np.inf)
            yield beside, low < high and side == inside
    yield math.nan, False


def error_of(function, *args, **kwargs):
    """What it says of bad input, or None."""
    try:
        function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.every
def test_numbers_at_below_and_above_both_ends_of_their_ranges(row):
    """The factory takes them, or says the argument, its range and what was given."""
    for name in row.numbers():
        interval = row.range_of(name)
        given = row.arguments().get(name, row.parameters()[name].default)
        if interval is None or callable(given):
            continue
        for number, is_allowed in around(interval):
            whole = "integers" in interval and math.isfinite(number)
            value = int(number) if whole else number
            values = [value] * len(given) if isinstance(given, list) else value
            error = error_of(row.make, **{name: values, **row.apart_from(name)})
            said = f"{row}, range {interval}: for {name}={value}: {error}"
            assert (error is None) == is_allowed, said
            if error:
                assert re.search(rf"^{name}\b.* must be .*{value}", error), said


def test_numbers_may_be_arrays(row):
    """JAX's, also while a program is traced that takes them as constants."""
    defaults = {k: p.default for k, p in row.parameters().items()}
    numbers = {
        k: jnp.float32(v)
        for k, v in (defaults | row.arguments()).items()
        if isinstance(v, float)
    }

    def update(grads, state, params):
        return row.make(**numbers).update(grads, state, params, **row.extra(params))

    state = row.make(**numbers).init(draw(0))
    updates, after = jax.eval_shape(update, draw(1), state, draw(0))
    assert types((updates, after)) == types((draw(1), state))


@pytest.mark.every
@pytest.mark.parametrize(
    "stacked_axes", [1, {"w": 1, "b": 0}, lambda p: {"w": p["w"].ndim - 1, "b": 0}]
)
def test_map_params_finds_the_state_of_stacked_layers(stacked_axes):
    tx = gx.novograd(0.1, stacked_axes=stacked_axes)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    names = optax.tree.map_params(
        tx, lambda _, name: name, tx.init(params), {"w": "w", "b": "b"},
        transform_non_params=lambda _: None,
    )  # fmt: skip
    assert optax.tree.get(names, "mu") == optax.tree.get(names, "nu")
    assert optax.tree.get(names, "nu") == {"w": "w", "b": "b"}


@pytest.mark.usefixtures("standard_promotion")
def test_map_params_takes_the_state_of_parameters_in_two_precisions(row):
    params = {"full": jnp.ones((4, 2)), "half": jnp.ones((4, 2), jnp.bfloat16)}
    tx, names = row.make(), {"full": "full", "half": "half"}
    found = optax.tree.map_params(
        tx,
        lambda _, name: name,
        tx.init(params),
        names,
        transform_non_params=lambda _: "none",
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    assert set(jax.tree.leaves(found)) <= {"full", "half", "none"}
    if row.name == "master_weights":
        assert found.residual == names


@in_turn(1)
def test_masked_and_partition_run_each_part_on_its_own(row):
    params, grads, tx = draw(0), draw(1), row.make()
    mask = {"w": True, "nested": [None, {"b": False}]}
    labels = {"w": "a", "nested": "b"}
    ways = {
        "masked": optax.masked(tx, mask, mask_compatible_extra_args=True),
        "partition": optax.partition(
            {"a": tx, "b": optax.sgd(1.0)}, labels, mask_compatible_extra_args=True
        ),
    }

    @in_numpy.jit
    def update(grads, params):
        def updates(tx, grads, params):
            return tx.update(grads, tx.init(params), params, **row.extra(params))[0]

        alone = updates(tx, {"w": grads["w"]}, {"w": params["w"]})
        return alone, {k: updates(tx, grads, params) for k, tx in ways.items()}

    alone, updates = update(grads, params)
    grad = grads["nested"][1]["b"]
    for way, rest in {"masked": grad, "partition": -grad}.items():
        expected = alone | {"nested": [None, {"b": rest}]}
        chex.assert_trees_all_close(updates[way], expected, rtol=2e-6)


def cleared(state):
    """Sums without a push as zeros: a finished sum may have any numbers."""

    def is_sum(node):
        return hasattr(node, "num_accumulated")

    def clear(node):
        if not is_sum(node) or node.num_accumulated:
            return node
        return node._replace(accumulated=jax.tree.map(jnp.zeros_like, node.accumulated))

    return jax.tree.map(clear, state, is_leaf=is_sum)


@pytest.mark.slow
@pytest.mark.quick_case("adagrad")
@in_turn(2)
def test_half_precision_is_single_precision_rounded(row, compiled):
    """An ulp of the same step in float32, without jit, where each operation rounds.

    The two dtypes take turns. test_large_leaves.py has each row in both.
    """
    skip_if_wide(row)
    dtype = ("float16", "bfloat16")[DESCRIPTORS.index(row) % 2]
    params, tx = draw(0, dtype), row.make()
    state, single = tx.init(params), types(compiled.tx.init(wide(params)))
    for seed in range(1, 4):
        grads, extra = draw(seed, dtype), row.extra(params)
        before = jax.tree.map(lambda x, t: np.asarray(x, t.dtype), state, single)
        wanted = compiled.update(wide(grads), before, wide(params), **extra)
        with jax.disable_jit():
            updates, state = tx.update(grads, state, params, **extra)
        # A number is rounded once: by half an ulp. A rate, and the mean of a gate, take
        # one that is already rounded.
        ulp = float(jnp.finfo(dtype).eps)
        after = cleared(state), cleared(wanted[1])
        for got, exact, once in ((updates, wanted[0], False), (*after, True)):
            rtol, atol = 0.51 * ulp if once and row in UNGATED else ulp, 1e-6
            if row.name in ("adagrad", "ftrl") and "clip" in row.variant:
                rtol, atol = 4 * ulp, ulp  # The link in front rounds what it clips.
            chex.assert_trees_all_close(wide(got), wide(exact), rtol=rtol, atol=atol)


def check_traced_types(row, tx, grads, params):
    """optax's conditionals are traced with the row in them. Nothing is compiled."""

    @functools.partial(jax.eval_shape, grads=grads, params=params)
    def _(grads, params):
        state = tx.init(params)
        updates, after = tx.update(grads, state, params, **row.extra(params))
        assert types(updates) == types(grads)
        assert types(after) == types(state)


@pytest.mark.slow
@in_turn(0)
def test_multi_steps_acts_once_on_the_mean(row, compiled, standard_promotion):
    params, grads = draw(0), draw(1)
    multi = optax.MultiSteps(row.make(), every_k_schedule=2)
    check_traced_types(row, multi, grads, params)
    multi = optax.MultiSteps(compiled.as_one(), every_k_schedule=2)
    state = multi.init(params)
    with jax.disable_jit():  # Its conditional runs one branch.
        first, state = multi.update(grads, state, params, **row.extra(params))
        second, state = multi.update(grads, state, params, **row.extra(params))
    chex.assert_trees_all_equal(first, jax.tree.map(np.zeros_like, grads))
    chex.assert_trees_all_close(second, compiled.trace[0][0], rtol=1e-5)


def test_apply_if_finite_refuses_nan_and_inf(row):
    if row.kwargs.get("clipvalue"):
        pytest.skip("clipping by value makes an infinite gradient finite, as in Keras")
    params = draw(0)
    tx = optax.apply_if_finite(row.make(), max_consecutive_errors=5)
    state = tx.init(params)
    check_traced_types(row, tx, draw(1), params)
    for bad in (np.nan, np.inf):
        grads = draw(1) | {"nested": [None, {"b": jnp.float32(bad)}]}
        with jax.disable_jit():  # Its conditional runs one branch.
            updates, state = tx.update(grads, state, params, **row.extra(params))
        chex.assert_trees_all_equal(updates, jax.tree.map(np.zeros_like, grads))
    assert state.total_notfinite == 2
    chex.assert_trees_all_equal(state.inner_state, row.make().init(params))


@in_turn(2)
def test_vmap_and_scan_equal_loops(row, compiled):
    batch = [(draw(i), draw(10 + i)) for i in range(3)]
    tx = row.make()

    @in_numpy.jit
    def three_steps(params, grads):
        def body(state, _):
            updates, state = jax.vmap(update)(grads, state, params)
            return state, (updates, state)

        return jax.lax.scan(body, jax.vmap(tx.init)(params), length=3)[1]

    def update(grads, state, params):
        return tx.update(grads, state, params, **row.extra(params))

    def stack(trees):
        return jax.tree.map(lambda *x: np.stack(x), *trees)

    got = three_steps(*map(stack, zip(*batch, strict=True)))
    loops = (compiled.run(grads, params) for params, grads in batch)
    expected = stack([stack(steps) for steps in zip(*loops, strict=True)])
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@in_turn(3)
def test_derivatives_through_the_update_are_finite(row):
    params, grads, tx = draw(0)["w"], draw(1)["w"], row.make()

    @in_numpy.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def loss(grads, params):
        updates, _ = tx.update(grads, tx.init(params), params, **row.extra(params))
        return jnp.sum(updates**2) + jnp.sum(updates)

    for at in (np.zeros_like(grads), grads):
        value, derivatives = loss(at, params)
        for by, derivative in zip(("gradients", "params"), derivatives, strict=True):
            assert np.isfinite(derivative).all(), (
                f"{row}: the derivative of its updates by the {by} is {derivative}, "
                f"for gradients {at}. A root or a quotient there has no derivative: "
                "see gradxform/_numbers/arithmetic.py."
            )
        if value == 0:
            continue
        # No derivative is finite because it was cut.
        # If L1 holds all weights at zero, the gradients change nothing.
        held = "l1_regularization_strength" in row.kwargs and not np.any(at)
        is_zero = not np.any(derivatives[held])
        assert is_zero == row.piecewise_constant, (
            f"{row.says('piecewise_constant')}. The derivative of its updates by the "
            f"{('gradients', 'params')[held]} is {derivatives[held]}, for gradients "
            f"{at}. It is 0 if the updates are piecewise constant, as signs are, or if "
            "a line cuts it: stop_gradient, a conversion to integers, a comparison."
        )


def test_a_leaf_without_gradient_keeps_its_state(row):
    params, tx = draw(0), row.make()
    start = tx.init(params)
    if row in UNGATED:  # A gate may wait, and then apply what came before.
        _, start = tx.update(draw(2), start, params, **row.extra(params))
    state = start
    for seed in (1, 3, 4):
        grads = draw(seed) | {"w": None}
        updates, state = tx.update(grads, state, params, **row.extra(params))
        # The mean of several pushes is dense; here it is of nothing.
        assert updates["w"] is None or not jnp.any(updates["w"])
        assert types(state) == types(start)
    moved = []
    for field in row.kept():
        value, initial = (optax.tree.get(x, field) for x in (state, start))
        chex.assert_trees_all_equal(value["w"], initial["w"])
        b, before = (tree["nested"][1]["b"] for tree in (value, initial))
        moved.append(np.any(b != before))
    assert any(moved) or not moved


# Rows of tables.


def is_sparse(leaf):
    return isinstance(leaf, gx.IndexedSlices)


@jax.jit
def densified(tree):
    return jax.tree.map(
        lambda g: g.densify() if is_sparse(g) else g, tree, is_leaf=is_sparse
    )


def table_and_bias(seed):
    rng = np.random.default_rng(seed)
    shapes = {"table": (4, 3), "b": (3,)}
    leaves = {k: number(rng, shape, "float32") for k, shape in shapes.items()}
    return leaves | {"nothing": None}


def of_rows(seed, indices):
    """A gradient with these rows of the table, beside a dense leaf and an empty one."""
    values = number(np.random.default_rng(seed), (len(indices), 3), "float32")
    rows = gx.IndexedSlices(np.asarray(indices, np.int32), values, (4, 3))
    return table_and_bias(seed) | {"table": rows}


@pytest.mark.slow
def test_sparse_updates_are_the_dense_ones(row):
    """On the touched rows alone, or behind densify, where the row says so."""
    # A row that one push touches, the next one may leave. No push touches row 2.
    rows = [3, 0, 3, 4], [1, 0, 1, 4], [3, 3, 1, 4]
    pushes = [of_rows(t, indices) for t, indices in enumerate(rows)]
    grads, params = pushes[0], table_and_bias(1)
    tx = row.make()
    if row.rows == "refused":
        every = r"changes every row.*\['table'\].*gradxform.lazy\("
        said = rf"({every}|makes room for.*\['table'\]).*gradxform.densify\(\)"
        with pytest.raises(TypeError, match=said):
            pytest.fail(
                f"{row.says('rows')}, but row-sparse gradients make "
                f"{tx.update(grads, tx.init(params), params, **row.extra(params))}."
            )
        if row.variant:  # Behind densify one row stands for all.
            return
        tx = optax.chain(gx.densify(), tx)

    @in_numpy.jit
    def both(grads, state, dense_state):
        extra = row.extra(params)
        updates, state = tx.update(grads, state, params, **extra)
        dense, after = tx.update(densified(grads), dense_state, params, **extra)
        return (densified(updates), state), (dense, after)

    def where_touched(grads, new, old):
        touched = np.isin(range(4), grads["table"].indices)[:, None]
        return jax.tree.map(
            lambda x, y: np.where(touched, x, y) if x.shape == (4, 3) else x, new, old
        )

    state, dense_state = tx.init(params), tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for grads in pushes:
        got, expected = both(grads, state, dense_state)
        if row.rows == "touched":
            none = jax.tree.map(jnp.zeros_like, expected[0])
            expected = where_touched(grads, expected, (none, dense_state))
        (_, state), (_, dense_state) = got, expected
        chex.assert_trees_all_close(
            got, expected, rtol=1e-6, custom_message=row.says("rows")
        )
        assert jax.tree.map(jax.typeof, state) == types


@pytest.mark.parametrize(
    "row", [row for row in DESCRIPTORS if row.rows == "touched"], ids=str
)
def test_a_gradient_without_rows_changes_no_row(row):
    grads, params = of_rows(0, []), table_and_bias(1)
    tx = row.make()
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert updates["table"].values.shape == (0, 3)
    dense, _ = tx.update(densified(grads), state, params)
    chex.assert_trees_all_close(updates["b"], dense["b"], rtol=1e-6)
    for new, old in zip(*map(jax.tree.leaves, (after, state)), strict=True):
        assert new.shape != (4, 3) or np.array_equal(new, old)


@pytest.mark.slow
def test_a_tree_without_leaves(row):
    tx = row.make()
    state = tx.init({})
    updates, after = tx.update({}, state, {}, **row.extra({}))
    assert updates == {}
    assert types(after) == types(state)


@pytest.mark.every
def test_a_gradient_of_another_shape_is_named(row):
    if not (row.reads_params or any(x.ndim for x in row.state(draw(0)))):
        pytest.skip("it looks at nothing but the gradients")
    params = draw(0)
    tx = row.make()
    state = tx.init(params)
    grads = draw(1)
    grads["nested"][1]["b"] = jnp.ones((3, 1))
    update = functools.partial(tx.update, **row.extra(params))
    with pytest.raises(TypeError, match=r"\['nested'\]\[1\]\['b'\].*float32\[3,1\]"):
        jax.eval_shape(update, grads, state, params)
    missing = draw(1)
    del missing["w"]
    with pytest.raises(TypeError, match=r"\['w'\].*no leaf"):
        jax.eval_shape(update, missing, state, params)


@pytest.mark.slow
def test_params_and_gradients_may_be_plain_numbers(row, compiled):
    """They may be arrays of NumPy, too."""
    tx = row.make()

    def plain(tree):
        b = tree["nested"][1]["b"]
        return {"w": np.asarray(tree["w"]), "nested": [None, {"b": float(b)}]}

    params, grads = plain(draw(0)), plain(draw(1))
    state = tx.init(params)
    assert types(state) == types(tx.init(draw(0)))
    updates, state = tx.update(grads, state, params, **row.extra(params))
    expected = compiled.trace[0]
    assert types(state) == types(expected[1])
    chex.assert_trees_all_close((updates, state), expected, rtol=2e-6)
