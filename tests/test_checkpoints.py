"""A run that stops, is saved by orbax and goes on equals the run that never stopped.

It may continue on another mesh. A run that ``optax.adagrad`` or ``optax.novograd``
began goes on with ours.
"""

import functools
import math

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


def draw(seed, half="bfloat16"):
    """A tree with a matrix, a tensor, a vector, a scalar and an empty node."""
    rng = np.random.default_rng(seed)

    def leaf(*shape, dtype="float32"):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return {
        "w": leaf(16, 8),
        "nested": [leaf(8, 8, 2, dtype=half), {"b": leaf(8, dtype=half)}],
        "s": leaf(),
        "nothing": None,
    }


def program(rows):
    """All that a new process makes before it reads a checkpoint."""
    txs = {name: row.make() for name, row in rows.items()}

    @jax.jit
    def init(params):
        return {name: tx.init(params) for name, tx in txs.items()}

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
        return copies, init(params)

    return begin, step


def kept(row):
    """The types of everything that a row keeps between two steps."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(row.make().init, draw(0)))
    return row.name, structure, *((x.shape, x.dtype, x.weak_type) for x in leaves)


# One row of those that keep the same. The rows of a public factory have one run and one
# checkpoint: dicts by row.
KEPT = {kept(row): row for row in reversed(DESCRIPTORS)}.values()
FACTORIES = {
    factory: {str(row): row for row in KEPT if row.name == factory}
    for factory in dict.fromkeys(row.name for row in DESCRIPTORS)
}
every_row = pytest.mark.parametrize("rows", FACTORIES.values(), ids=FACTORIES)


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


@pytest.mark.slow
@every_row
def test_a_run_resumed_after_any_step_is_bit_identical(rows, tmp_path):
    def bits_by_row(now):
        return {name: bits([tree[name] for tree in now]) for name in rows}

    begin, step = program(rows)
    now = begin(draw(0))
    trace = []
    for i in range(STEPS):
        save(tmp_path / str(i), now)
        trace.append(bits_by_row(now))
        now = step(*now, draw(1 + i), i)
    trace.append(bits_by_row(now))

    begin, step = program(rows)
    target = jax.eval_shape(begin, draw(0))
    for stopped in range(STEPS):
        now = restore(tmp_path / str(stopped), target)
        assert bits_by_row(now) == trace[stopped]
        for i in range(stopped, STEPS):
            now = step(*now, draw(1 + i), i)
            assert bits_by_row(now) == trace[i + 1]


# The axis type and shape of a mesh, then one spec for each rank of a parameter.
HERE = (AxisType.Auto, (4, 2), P(), P("x"), P("x", "y"), P(None, "x"))
ELSEWHERE = (
    (AxisType.Explicit, (2, 4), P(), P(), P("y"), P("x", "y")),
    (AxisType.Auto, (1, 1), P(), P(), P(), P()),
)


def draw_on(where, seed):
    """All in float32: each mesh sums in its own order, and half precision shows it."""
    axis_type, shape, *specs = where
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, ("x", "y"), (axis_type,) * 2, devices=devices)
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, specs[x.ndim])),
        draw(seed, half="float32"),
    )


@pytest.mark.slow
@every_row
def test_a_sharded_run_resumes_on_its_own_mesh_and_on_others(rows, tmp_path):
    """It goes on here and elsewhere; the other meshes take turns over the factories.

    What is restored there has the bits of the old run and the places of a new one, and
    ``test_sharded.py`` tests that each row makes the same steps on every mesh.
    """
    turn = list(FACTORIES.values()).index(rows) % len(ELSEWHERE)
    begin, step = program(rows)

    def push(now, where, i):
        return step(*now, draw_on(where, 1 + i), i)

    now = begin(draw_on(HERE, 0))
    for i in range(STEPS):
        if i == 3:  # A gate of two pushes has one.
            save(tmp_path / "checkpoint", now)
            saved = bits(now)
        now = push(now, HERE, i)
    end = bits(now)

    for where in (HERE, *ELSEWHERE):
        fresh = begin(draw_on(where, 0))
        resumed = restore(tmp_path / "checkpoint", fresh)
        assert bits(resumed) == saved
        assert [x.sharding for x in jax.tree.leaves(resumed)] == [
            x.sharding for x in jax.tree.leaves(fresh)
        ]
        if where not in (HERE, ELSEWHERE[turn]):
            continue
        for i in range(3, STEPS):
            resumed = push(resumed, where, i)
        if where is HERE:
            assert bits(resumed) == end
        chex.assert_trees_all_close(
            jax.device_get(resumed), jax.device_get(now), rtol=1e-6, atol=1e-6
        )


@pytest.mark.slow
def test_an_accumulator_resumes_half_full(tmp_path):
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2, reduction="row_mean")
    table = jnp.zeros((3, 1))

    def push(now, rows, values):
        grads = gx.IndexedSlices(rows, jnp.array(values)[:, None], table.shape)
        params, state = now
        return gx.apply_gradients(tx, grads, state, params, local_step=0)

    save(tmp_path / "checkpoint", push((table, tx.init(table)), [0], [1.0]))
    params, state = restore(tmp_path / "checkpoint", (table, tx.init(table)))
    assert state.num_accumulated == 1
    assert state.row_counts.tolist() == [1, 0, 0]
    params, state = push((params, state), [0, 1], [3.0, 5.0])
    assert params.ravel().tolist() == [-2.0, -5.0, 0.0]  # (1 + 3) / 2, 5 / 1
    assert (state.global_step, state.num_accumulated) == (1, 0)


def test_a_gate_resumes_with_its_counts(tmp_path):
    tx = gx.drop_stale(optax.sgd(1.0), max_staleness=1)
    params, state = jnp.array(0.0), tx.init(jnp.array(0.0))

    def push(params, state, local_step):
        grads = jnp.ones_like(params)
        return gx.apply_gradients(tx, grads, state, params, local_step=local_step)

    for _ in range(3):  # 0, 1 and 2 steps late
        params, state = push(params, state, 0)
    save(tmp_path / "checkpoint", (params, state))
    fresh = jnp.array(0.0), tx.init(params)
    params, state = restore(tmp_path / "checkpoint", fresh)
    assert (state.global_step, state.stale_count, state.staleness) == (2, 1, 2)
    params, state = push(params, state, 0)
    assert (params, state.global_step, state.stale_count) == (-2.0, 2, 2)
    params, state = push(params, state, 1)
    assert (params, state.global_step, state.stale_count) == (-3.0, 3, 2)


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
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_ours_goes_on_from_a_state_of_optax(switch, setting, tmp_path):
    theirs, ours = map(setting, switch)
    params = draw(0, "float32")
    _, (params, state) = train(theirs, (params, theirs.init(params)), range(3))
    there, _ = train(theirs, (params, state), range(3, 6))

    fresh = ours.init(params)
    adopted = params, adopt(fresh, state)
    here, _ = train(ours, adopted, range(3, 6))
    chex.assert_trees_all_close(here, there, rtol=2e-6, atol=1e-7)
    # Orbax goes by the names of fields, and these are the same, too.
    save(tmp_path / "checkpoint", (params, state))
    assert bits(restore(tmp_path / "checkpoint", (params, fresh))) == bits(adopted)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["adagrad", "novograd"])
def test_sums_in_half_precision_are_adopted_in_float32(name, tmp_path):
    theirs, ours = (make(0.1) for make in SWITCHES[name])
    params = draw(0)
    _, (params, state) = train(
        theirs, (params, theirs.init(params)), range(3), "bfloat16"
    )
    there, _ = train(theirs, (params, state), range(3, 6), "bfloat16")

    fresh = ours.init(params)
    adopted = params, adopt(fresh, state)
    assert jax.tree.map(jax.typeof, adopted[1]) == jax.tree.map(jax.typeof, fresh)
    assert jax.tree.map(jax.typeof, state) != jax.tree.map(jax.typeof, fresh)
    here, _ = train(ours, adopted, range(3, 6), "bfloat16")
    chex.assert_trees_all_close(here, there, rtol=2e-2, atol=1e-3)
    save(tmp_path / "checkpoint", (params, state))
    assert bits(restore(tmp_path / "checkpoint", (params, fresh))) == bits(adopted)


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


OTHERS = {"schedule": gx.adagrad(optax.constant_schedule(0.1)), "mu": gx.novograd(0.1)}


@pytest.mark.parametrize("ours", OTHERS.values(), ids=OTHERS)
def test_a_state_with_other_fields_is_refused(ours, tmp_path):
    params = draw(0)
    theirs, fresh = optax.adagrad(0.1).init(params), ours.init(params)
    with pytest.raises((TypeError, ValueError), match=r"zip\(\)|reshape"):
        adopt(fresh, theirs)
    save(tmp_path / "checkpoint", (params, theirs))
    with pytest.raises(ValueError, match="do not match"):
        restore(tmp_path / "checkpoint", (params, fresh))


def test_sums_of_other_shapes_are_refused():
    params = draw(0)
    theirs, ours = optax.adagrad(0.1), gx.adagrad(0.1, row_wise=True)
    with pytest.raises(TypeError, match="reshape"):
        adopt(ours.init(params), theirs.init(params))
