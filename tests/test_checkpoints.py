"""A run that stops, is saved by orbax and goes on equals the run that never stopped.

It may continue on another mesh. A run that ``optax.adagrad`` or ``optax.novograd``
began goes on with ours.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.descriptors import DESCRIPTORS

STEPS = 5
SAVED = 3  # A gate of two pushes has one.


def draw(seed, half="bfloat16"):
    """A tree with a matrix, a vector, a scalar and an empty node."""
    rng = np.random.default_rng(seed)

    def leaf(*shape, dtype="float32"):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return {
        "w": leaf(16, 8),
        "nested": [{"b": leaf(8, dtype=half)}],
        "s": leaf(),
        "nothing": None,
    }


def program(rows):
    """All that a new process makes before it reads a checkpoint."""
    txs = {name: row.make() for name, row in rows.items()}

    # It donates, as a training does: restored arrays must bear that.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads, i):
        new_params, new_state = {}, {}
        for name, tx in txs.items():
            extra = rows[name].extra(params[name])
            if "local_step" in extra:
                # Two pushes from each step: some act, some wait and some are stale.
                extra["local_step"] = i // 2
            new_params[name], new_state[name] = gx.apply_gradients(
                tx, grads, state[name], params[name], **extra
            )
        return new_params, new_state

    def begin(params):
        # Each row has buffers of its own, because each of them is donated.
        copies = {name: jax.tree.map(jnp.copy, params) for name in rows}
        return copies, {name: tx.init(params) for name, tx in txs.items()}

    return begin, step


def kept(row):
    """The types of everything that a row keeps between two steps."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(row.make().init, draw(0)))
    return row.name, structure, *((x.shape, x.dtype, x.weak_type) for x in leaves)


FACTORIES = list(dict.fromkeys(row.name for row in DESCRIPTORS))


@functools.cache
def rows_of(factory):
    """One row of those that keep the same: they have one run and one checkpoint."""
    rows = [row for row in reversed(DESCRIPTORS) if row.name == factory]
    return {str(row): row for row in {kept(row): row for row in rows}.values()}


def save(path, tree):
    """Parameters and state in one tree: orbax refuses a state that has no leaves."""
    with ocp.StandardCheckpointer() as checkpointer:  # Its end waits for the write.
        checkpointer.save(path, tree)


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def bits(tree):
    """Everything that must be equal: classes of tuples, types, and the bits of NaNs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (x.shape, x.dtype, x.weak_type, np.asarray(x).tobytes()) for x in leaves
    ]


# The axis type and shape of a mesh, then one spec for each rank of a parameter.
HERE = AxisType.Auto, (4, 2), P(), P("x"), P("x", "y")
ELSEWHERE = (AxisType.Explicit, (2, 4), P(), P(), P("y")), None


def draw_on(where, seed):
    """On a mesh, or on one device."""
    if where is None:
        return draw(seed)
    axis_type, shape, *specs = where
    mesh = jax.make_mesh(shape, ("x", "y"), (axis_type,) * 2)
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, specs[x.ndim])), draw(seed)
    )


class Run:
    """The rows of a factory, and what they kept before each step and after the last."""

    def __init__(self, factory, path):
        self.number = FACTORIES.index(factory)
        self.rows, self.path = rows_of(factory), path / "checkpoint"
        self.begin, self.step = program(self.rows)
        now = self.begin(draw_on(HERE, 0))
        self.values, self.bits = [jax.device_get(now)], [bits(now)]
        for i in range(STEPS):
            if i == SAVED:
                save(self.path, now)
            now = self.step(*now, draw_on(HERE, 1 + i), i)
            self.values.append(jax.device_get(now))
            self.bits.append(bits(now))


@pytest.fixture(scope="module", params=FACTORIES)
def a_run(request, tmp_path_factory):
    return Run(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
def test_a_run_resumed_after_any_step_is_bit_identical(a_run):
    """Orbax writes one of the steps; the others are kept as arrays of NumPy.

    The program is that of the run; the test below has one of a new process.
    """
    fresh = a_run.begin(draw_on(HERE, 0))
    places = jax.tree.map(lambda x: x.sharding, fresh)
    for stopped in range(STEPS):
        if stopped == SAVED:
            now = restore(a_run.path, fresh)
        else:
            now = jax.device_put(a_run.values[stopped], places)
        assert bits(now) == a_run.bits[stopped]
        for i in range(stopped, STEPS):
            now = a_run.step(*now, draw_on(HERE, 1 + i), i)
            assert bits(now) == a_run.bits[i + 1]


@pytest.mark.slow
def test_a_sharded_run_resumes_on_its_own_mesh_and_on_others(a_run):
    """The test above goes on here; one other mesh and one device take turns.

    What is restored there has the bits of the old run and the places of a new one, and
    ``test_sharded.py`` tests that each row makes the same steps on every mesh.
    """
    where = ELSEWHERE[a_run.number % len(ELSEWHERE)]
    begin, step = program(a_run.rows)
    fresh = begin(draw_on(where, 0))
    now = restore(a_run.path, fresh)
    assert bits(now) == a_run.bits[SAVED]
    assert [x.sharding for x in jax.tree.leaves(now)] == [
        x.sharding for x in jax.tree.leaves(fresh)
    ]
    for i in range(SAVED, STEPS):
        now = step(*now, draw_on(where, 1 + i), i)
    pairs = zip(jax.tree.leaves(now), jax.tree.leaves(a_run.values[-1]), strict=True)
    for got, expected in pairs:
        # Each mesh sums in its own order, and half precision shows it.
        tol = 1e-2 if got.dtype == jnp.bfloat16 else 1e-6
        chex.assert_trees_all_close(jax.device_get(got), expected, rtol=tol, atol=tol)


def adopt(fresh, theirs):
    """optax's state as ours, which has the same leaves in the same order."""
    pairs = zip(jax.tree.leaves(theirs), jax.tree.leaves(fresh), strict=True)
    leaves = [jnp.asarray(old, new.dtype).reshape(new.shape) for old, new in pairs]
    return jax.tree.unflatten(jax.tree.structure(fresh), leaves)


# Theirs, and ours with arguments that mean the same.
SWITCHES = {
    "adagrad": (optax.adagrad, gx.adagrad),
    "adagrad-eps": (
        functools.partial(optax.adagrad, eps=1e-2),
        functools.partial(gx.adagrad, eps=1e-2),
    ),
    "novograd": (
        optax.novograd,
        functools.partial(gx.novograd, b1=0.9, b2=0.25, eps=1e-6, eps_in_sqrt=False),
    ),
    "novograd-eps": (
        functools.partial(optax.novograd, b1=0.8, b2=0.5, eps=1.0, weight_decay=0.1),
        functools.partial(
            gx.novograd, b1=0.8, b2=0.5, eps=1.0, weight_decay=0.1, eps_in_sqrt=False
        ),
    ),
    "novograd-eps_root": (
        functools.partial(optax.novograd, eps=0.0, eps_root=1.0),
        functools.partial(gx.novograd, b1=0.9, b2=0.25, eps=1.0),
    ),
}
# The optimizer alone; then behind a clip, with a schedule, which would show a count
# that is one off.
SETTINGS = {
    "alone": lambda make: make(0.1),
    "in a chain": lambda make: optax.chain(
        optax.clip_by_global_norm(1.0), make(optax.exponential_decay(0.1, 1, 0.7))
    ),
}


def train(tx, now, steps, half="float32"):
    """The last updates, then parameters and state."""
    params, state = now
    update = jax.jit(tx.update)
    for i in steps:
        updates, state = update(draw(1 + i, half), state, params)
        params = gx.apply_updates(params, updates)
    return updates, (params, state)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")  # For optax's own code.
@pytest.mark.parametrize(
    ("switch", "setting", "half"),
    [
        *zip(SWITCHES, itertools.cycle(SETTINGS), itertools.repeat("float32")),
        # Their sums are in half precision then, and ours in float32.
        ("adagrad", "alone", "bfloat16"),
        ("novograd", "alone", "bfloat16"),
    ],
)
def test_ours_goes_on_from_a_state_of_optax(switch, setting, half, tmp_path):
    theirs, ours = map(SETTINGS[setting], SWITCHES[switch])
    params, types = draw(0, half), functools.partial(jax.tree.map, jax.typeof)
    _, (params, state) = train(theirs, (params, theirs.init(params)), range(3), half)
    there, _ = train(theirs, (params, state), range(3, 6), half)

    fresh = ours.init(params)
    adopted = params, adopt(fresh, state)
    assert types(adopted[1]) == types(fresh)
    assert half == "float32" or types(state) != types(fresh)
    here, _ = train(ours, adopted, range(3, 6), half)
    rtol, atol = (2e-6, 1e-7) if half == "float32" else (2e-2, 1e-3)
    chex.assert_trees_all_close(here, there, rtol=rtol, atol=atol)
    # Orbax goes by the names of fields, and these are the same, too.
    save(tmp_path / "checkpoint", (params, state))
    assert bits(restore(tmp_path / "checkpoint", (params, fresh))) == bits(adopted)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "ours",
    [
        optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
        gx.adagrad(0.1, global_clipnorm=1.0),
    ],
    ids=["clip", "global_clipnorm"],
)
def test_the_clip_can_be_switched_too(ours):
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))
    params = draw(0, "float32")
    _, (params, state) = train(theirs, (params, theirs.init(params)), range(3))
    there, _ = train(theirs, (params, state), range(3, 6))
    # Ours keeps the last norm, and after it what optax keeps.
    adopted = adopt(ours.init(params), (0.0, state))
    here, _ = train(ours, (params, adopted), range(3, 6))
    chex.assert_trees_all_close(here, there, rtol=2e-6, atol=1e-7)
