"""Every row of the migration tables that names code is executed and checked.

The code runs with the names of ``namespace``, in double precision so that no option
hides behind rounding. The check that ``CHECKS`` has for it receives the result. A call
of an optimizer needs no entry there: it is compared with its oracle, or its error has
to name the number. A row with other code fails until it has a check, and no check is
left over.
"""

import contextlib
import functools
import inspect
import pathlib
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform._ray.layout import ServerLayout  # It needs no cluster of processes.
from tests import oracles, test_golden
from tests.conftest import ON_RAY

PAGES = pathlib.Path(__file__).parents[1] / "docs/coming_from"
TABLES = "\n".join(
    (PAGES / f"{source}.md").read_text()
    for source in ("tensorflow", "keras", "novograd", "optax")
)


def rows():
    """The lines of the migration tables whose second cell holds code, and the code."""
    for table in re.findall(r"^\| there \|.*\n((?:\|.*\n?)*)", TABLES, re.M):
        for line in table.splitlines()[1:]:
            _, here, _ = re.fullmatch(r"\| (.+?) \| (.*?) ?\| (.*?) ?\|", line).groups()
            if here:
                yield line, here.strip("`")


def loss_fn(params, scale=1.0):
    return scale * (0.2 * jnp.sum(params["w"] ** 2) + 0.6 * params["b"])


PARAMS = {"w": np.array([1.0, -2.0, 3.0]), "b": np.array(0.5)}
GRADS = {"w": 0.4 * PARAMS["w"], "b": np.array(0.6)}  # of loss_fn
NORM = np.sqrt(np.sum(GRADS["w"] ** 2) + GRADS["b"] ** 2)
ACC = {k: 0.1 + g**2 for k, g in GRADS.items()}  # Adagrad's sums after one update
ADAGRAD_UPDATE = {k: -0.1 * g / np.sqrt(ACC[k] + 1e-7) for k, g in GRADS.items()}


# A table, rows of its gradient with one of them repeated, and their dense gradient.
TABLE, IDS = np.arange(8.0).reshape(4, 2), np.array([3, 1, 3])
ROWS = 2 * TABLE[IDS]
DENSE = np.zeros((4, 2))
np.add.at(DENSE, IDS, ROWS)


def table_loss(params, ids):
    return jnp.sum(gx.lookup(params["table"], ids) ** 2)


def after_one(tx, **extra):
    """The state after one update with the gradients."""
    params, grads = jax.tree.map(jnp.asarray, (PARAMS, GRADS))
    return jax.jit(tx.update)(grads, tx.init(params), params, **extra)[1]


@functools.cache
def names():
    """What the names in the tables' code stand for, without the server."""
    params, grads = jax.tree.map(jnp.asarray, (PARAMS, GRADS))
    tx, clip, novograd = gx.adagrad(0.1), gx.clip_by_global_norm(1.0), gx.novograd(0.1)
    late = gx.drop_stale(gx.adagrad(0.1), 1)
    summing = gx.conditional_accumulator(gx.adagrad(0.1), 2)
    window = gx.conditional_accumulator(gx.adagrad(0.1), 9)
    micro = gx.accumulate(gx.adagrad(0.1), 2)
    return {
        **{"gx": gx, "jax": jax, "optax": optax, "loss_fn": loss_fn},
        "ftrl": gx.ftrl(0.1),
        **{"params": params, "grads": grads, "averaged": {"w": 0.0, "b": 0.0}},
        **{"tx": tx, "state": after_one(tx)},
        **{"clip": clip, "clip_state": clip.init(params), "norm": 100.0},
        **{"novograd": novograd, "novograd_state": after_one(novograd)},
        **{"late": late, "late_state": after_one(late, local_step=0)},
        **{"summing": summing, "summing_state": after_one(summing, local_step=0)},
        **{"window": window, "window_state": after_one(window, local_step=0)},
        **{"micro": micro, "micro_state": after_one(micro)},
        "scheduled_state": after_one(gx.adagrad(optax.constant_schedule(0.1))),
        **{"indices": IDS, "values": ROWS},
        **{"learning_rate": 0.1, "staleness": 1, "local_step": 1, "clip_norm": 1.0},
        **{"table": jnp.asarray(TABLE), "ids": IDS, "table_loss": table_loss},
        "bags": np.array([[3, 1], [2, 0]]),
        "shares": np.array([[2.0, 0.5], [1.0, 0.0]]),
        "slices": gx.IndexedSlices(IDS, jnp.asarray(ROWS), TABLE.shape),
        "row_mean": gx.conditional_accumulator(tx, 1, reduction="row_mean"),
        **{"grad_loss": 2.0, "weights": [jnp.float64(7.0), jnp.float64(8.0)]},
    }


def namespace(code):
    made = jax.tree.map(  # Some of the code donates them.
        lambda x: x.copy() if isinstance(x, jax.Array) else x, names()
    )
    if re.search(r"\bserver\.", code):
        made["server"] = gx.ParameterServer(made["params"], made["tx"])
    return made


# Code with engines: their threads do not have double precision.
OF_ENGINES = re.compile(r"\b(engines|job|run)\b")


@contextlib.contextmanager
def namespace_of_engines(folder):
    """The names of such code. Three of the job's four pushes are in ``folder``."""
    params, tx = jax.tree.map(np.float32, PARAMS), gx.adagrad(0.1)
    step_fn = jax.jit(jax.value_and_grad(loss_fn))
    job = engines.Job(params, tx, [engines.Worker(step_fn)], 4)
    with engines.simulated(job._replace(pushes=3), checkpoint=folder / "run") as run:
        list(run.pushes)
    with engines.simulated(job) as run:
        yield {
            **{"gx": gx, "jax": jax, "engines": engines, "job": job, "run": run},
            **{"params": params, "tx": tx, "step_fn": step_fn},
            "dataset_fn": lambda index: lambda number: (np.float32(index + number),),
            **{"folder": folder / "run", "logs": folder / "logs"},
        }


# Code with a model of Keras, which computes in float32.
OF_KERAS = re.compile(r"\bmodel\b")


def namespace_of_keras(folder, rate=0.1):
    """The names of such code. The model has been trained, saved and loaded."""
    import keras

    if not isinstance(rate, float):
        rate = keras.optimizers.schedules.ExponentialDecay(*rate)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.Adagrad(rate, global_clipnorm=0.5), "mse")
    for seed in range(5):
        model.train_on_batch(*keras_batch(seed))
    model.save(folder / "model.keras")
    model = keras.models.load_model(folder / "model.keras")
    trained = [v.value for v in model.trainable_variables]
    tx = gx.from_config(keras.optimizers.serialize(model.optimizer))
    return {"optax": optax, "model": model, "trained": trained, "tx": tx}


def keras_batch(seed):
    x = np.random.default_rng(seed).standard_normal((16, 3)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def check_goes_on_as_keras(named, state):
    """10 further steps here, and 10 of the model itself."""
    model, params = named["model"], named["trained"]
    rest = [v.value for v in model.non_trainable_variables]

    def loss_fn(params, x, y):
        return jnp.mean((model.stateless_call(params, rest, x)[0] - y) ** 2)

    step = gx.minimize(loss_fn, named["tx"], donate=False)
    before = model.get_weights()
    for seed in range(5, 15):
        params, state, loss = step(params, state, *keras_batch(seed))
        expected = model.train_on_batch(*keras_batch(seed))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, theirs, was in zip(params, model.get_weights(), before, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        assert np.abs(theirs - was).max() > 1e-3


def equals(expected, rtol=1e-9):
    def check(got):
        chex.assert_trees_all_close(got, expected, rtol=rtol)

    return check


def gives(expected):
    def check(got):
        assert got == expected

    return check


def trains_as(oracle, rtol=1e-9, **options):
    """The transformation follows the oracle with these options for some steps."""

    def check(tx):
        params, state = PARAMS, tx.init(PARAMS)
        sequence = [{k: g * scale for k, g in GRADS.items()} for scale in (1, 3, 0.3)]
        expected = oracle(PARAMS, sequence, **{"learning_rate": 0.1} | options)
        step = jax.jit(functools.partial(gx.apply_gradients, tx))
        for grads, (wanted, *_) in zip(sequence, expected, strict=True):
            params, state = step(grads, state, params)
            chex.assert_trees_all_close(params, wanted, rtol=rtol, atol=rtol)

    return check


def saves(**options):
    """Everything else is the default."""

    def check(checkpoint):
        default = engines.Checkpoint(checkpoint.directory)
        assert checkpoint == default._replace(**options)

    return check


def check_pushes(job, pushes):
    with engines.simulated(job) as run:
        assert len(list(run.pushes)) == pushes


def check_resumes(engine):
    with engine as run:
        assert run.resumed == 3
        assert len(list(run.pushes)) == 1


# What TensorFlow 2.21 computed in a cluster of processes with one worker: the losses of
# four calls of `schedule`, and the parameters after `join`.
SCHEDULED_LOSSES = [3.1, 2.829936, 2.641124, 2.4903982]
SCHEDULED = {"w": np.array([0.77351534, -1.7403494, 2.7316749]), "b": 0.2416921}


def check_scheduled(engine):
    """The engine makes the losses and leaves the parameters that TensorFlow did."""
    with engine as run:
        losses = [push.loss for push in run.pushes]
        trained = jax.tree.map(np.asarray, run.server.pull()[0])
    np.testing.assert_allclose(losses, SCHEDULED_LOSSES, rtol=1e-5)
    equals(SCHEDULED, rtol=1e-5)(jax.tree.map(np.float64, trained))


def takes_late_gradients(server):
    for global_step in (1, 2):
        assert server.push(GRADS, 0).global_step == global_step  # The second is late.
    *_, (wanted, *_) = oracles.adagrad(PARAMS, [GRADS, GRADS], learning_rate=0.1)
    equals(wanted)(server.pull()[0])


def draw_minibatches_of_their_own(workers):
    drawn = [worker.batch(number) for worker in workers for number in (0, 1)]
    assert drawn == [(0.0,), (1.0,), (1.0,), (2.0,)]
    params = jax.tree.map(np.float32, PARAMS)
    losses = [worker.gradient(params, *worker.batch(3))[0] for worker in workers]
    np.testing.assert_allclose(losses, [3 * 3.1, 4 * 3.1], rtol=1e-6)


def trains_through_epochs(job):
    with engines.simulated(job) as run:
        pushes = list(run.pushes)
    assert [push.number for push in pushes] == [*range(6)]
    # The minibatch of number 0 makes the loss 0; from then on it falls for each scale.
    falls = [push.loss / push.number for push in pushes[1:]]
    assert falls == sorted(falls, reverse=True)


def refuses_nan(server):
    params, seen = server.pull()
    with pytest.raises(ValueError, match="must be finite"):
        server.push({**params, "w": np.nan * params["w"]}, seen)


def updates_to(expected):
    """The transformation's first updates."""

    def check(tx):
        equals(expected)(jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)[0])

    return check


def first_step(result):
    """Adagrad's first step: the parameters alone."""
    equals({k: PARAMS[k] + ADAGRAD_UPDATE[k] for k in PARAMS})(result[0])


def rests_at_b(result):
    """The same for w; b has no gradient in the last push, so its sum waits."""
    params, state = result
    equals(PARAMS | {"w": PARAMS["w"] + ADAGRAD_UPDATE["w"]})(params)
    equals(GRADS["b"])(state.accumulated["b"])


def second_step(result):
    """Adagrad's second step: parameters and sums, from the state after the first."""
    params, state = result
    sums = {k: a + GRADS[k] ** 2 for k, a in ACC.items()}
    equals(sums)(optax.tree.get(state, "sum_of_squares"))
    equals({k: PARAMS[k] - 0.1 * GRADS[k] / np.sqrt(sums[k] + 1e-7) for k in PARAMS})(
        params
    )


def accepted_second_step(result):
    second_step(result)
    assert result[1].global_step == 2


def novograds_second_step(result):
    params, _ = result
    *_, (wanted, _, _) = oracles.novograd(PARAMS, [GRADS, GRADS], 0.1)
    first, _, _ = next(oracles.novograd(PARAMS, [GRADS], 0.1))
    equals({k: PARAMS[k] + wanted[k] - first[k] for k in PARAMS})(params)


def drops_what_is_late(tx):
    state = tx.init(PARAMS)
    for stale_count in (0, 0, 1):
        _, state = tx.update(GRADS, state, local_step=0)
        assert state.stale_count == stale_count


def moves_averages_with_every_push(tx):
    """The last push is late: w rests and the average moves."""
    params, state = PARAMS, tx.init(PARAMS)
    for step, local_step in enumerate((0, 1, 0)):
        before = params
        params, state = gx.apply_gradients(
            tx, GRADS, state, params, local_step=local_step
        )
        equals(before["b"] - GRADS["b"])(params["b"])
        assert np.any(params["w"] != before["w"]) == (step < 2)


def decayed(decay):
    """Adagrad's first update of gradients to which the weights were added."""
    grads = {k: g + decay * PARAMS[k] for k, g in GRADS.items()}
    return {k: -0.1 * g / np.sqrt(0.1 + g**2 + 1e-7) for k, g in grads.items()}


def skips_what_is_not_finite(tx):
    for bad in (np.inf, 1e30):  # The norm of the second is infinite too.
        grads = GRADS | {"b": np.array(bad, np.float32)}
        updates, state = tx.update(grads, tx.init(PARAMS))
        assert optax.tree.get(state, "total_notfinite") == 1
        assert jnp.all(updates["w"] == 0)


def sums_in_bfloat16(tx):
    sums = tx.init(PARAMS).accumulated
    assert {x.dtype for x in sums.values()} == {jnp.dtype("bfloat16")}


NO_UPDATE = {"w": np.zeros(3), "b": np.array(0.0)}
ADAGRAD_UPDATE_OF_THE_SUM = {
    k: -0.1 * 2 * g / np.sqrt(0.1 + 4 * g**2 + 1e-7) for k, g in GRADS.items()
}


def keeps_state_push_by_push(tx):
    """It gives the sum of two of Adagrad's updates, not one update of the sum."""
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(GRADS, state, PARAMS)
    twice = {
        k: u - 0.1 * GRADS[k] / np.sqrt(ACC[k] + GRADS[k] ** 2 + 1e-7)
        for k, u in ADAGRAD_UPDATE.items()
    }
    equals(twice)(updates)


def acts_on_two(expected):
    """Of two equal pushes, the first gives nothing, the second these updates."""

    def check(tx):
        first, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=0)
        second, _ = tx.update(GRADS, state, PARAMS, local_step=0)
        equals(NO_UPDATE)(first)
        equals(expected)(second)

    return check


def obeys_the_new_rate(tx):
    state = tx.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float64(0.5)
    equals({k: 5 * u for k, u in ADAGRAD_UPDATE.items()})(
        tx.update(GRADS, state, PARAMS)[0]
    )


def learns_w_alone(result):
    params, state, loss = result
    sums = ACC["w"] + GRADS["w"] ** 2
    w = PARAMS["w"] - 0.1 * GRADS["w"] / np.sqrt(sums + 1e-7)
    equals(({"w": w, "b": PARAMS["b"]}, loss_fn(PARAMS)))((params, loss))
    equals({"w": sums, "b": ACC["b"]})(optax.tree.get(state, "sum_of_squares"))


def steps_on_touched_rows(result):
    params, state = result
    sums = 0.1 + DENSE**2
    equals(TABLE - 0.1 * DENSE / np.sqrt(sums + 1e-7))(params)
    equals(sums)(optax.tree.get(state, "sum_of_squares"))


def rests_in_other_rows(tx):
    """A second gradient, of row 1 alone, moves row 1 alone."""
    params, state = jnp.asarray(TABLE), tx.init(TABLE)
    slices = gx.IndexedSlices(IDS, ROWS, TABLE.shape)
    before, state = gx.apply_gradients(tx, slices, state, params)
    other = gx.IndexedSlices([1], ROWS[:1], TABLE.shape)
    after, _ = gx.apply_gradients(tx, other, state, before)
    assert np.any(before != TABLE, axis=1).tolist() == [False, True, False, True]
    assert np.any(after != before, axis=1).tolist() == [False, True, False, False]


def replays(name):
    """The transformation gives the trace of this optimizer of TensorFlow 1."""

    def check(tx):
        case = test_golden.CASES[f"tf1_optimizers:{name}Optimizer"]
        assert case["settings"]["learning_rate"] == names()["learning_rate"]
        params = test_golden.tree(case["params"])
        state = tx.init(params)
        for step in case["steps"]:
            grads = test_golden.tree(step["grads"])
            params, state = gx.apply_gradients(tx, grads, state, params)
            wanted = test_golden.tree(step["params"])
            test_golden.agree(params, wanted, floor=1, rtol=1e-4)

    return check


def ftrl_moves(rows):
    """FTRL has moved these rows of the table, and no others."""
    *_, (wanted, _, _) = oracles.ftrl({"": TABLE}, [{"": DENSE}], 0.1)
    return np.where(np.isin(np.arange(4), rows)[:, None], wanted[""], TABLE)


def moves_every_row(tx):
    """Also row 2, though no gradient has touched it."""
    slices = gx.IndexedSlices(IDS, ROWS, TABLE.shape)
    params = jnp.asarray(TABLE)
    params, _ = gx.apply_gradients(tx, slices, tx.init(params), params)
    assert np.all(params[2] != TABLE[2])


def skips_a_step_of_nan(tx):
    grads = GRADS | {"b": np.array(np.nan)}
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert optax.tree.get(state, "total_notfinite") == 1
    equals(NO_UPDATE)(updates)


def averages_rows_by_the_pushes_that_held_them(tx):
    params, state = jnp.asarray(TABLE), tx.init(TABLE)
    for row, value in ((0, 1.0), (2, 3.0)):
        pushed = gx.IndexedSlices([row, 3], np.full((2, 2), value), TABLE.shape)
        params, state = gx.apply_gradients(tx, pushed, state, params, local_step=0)
    mean = np.array([[1.0], [0.0], [3.0], [2.0]])
    equals(TABLE - 0.1 * mean / np.sqrt(0.1 + mean**2 + 1e-7))(params)


def says(error, match):
    """The code raises this."""
    return error, match


FIRST_NU = np.sum(GRADS["w"] ** 2)

CHECKS = {
    # DropStaleGradientOptimizer
    "gx.drop_stale(tx, max_staleness=staleness)": drops_what_is_late,
    "gx.global_step(late_state), jax.grad(loss_fn)(params)": equals((1, GRADS)),
    'optax.partition({"train": tx, "freeze": optax.set_to_zero()}, '
    '{"w": "train", "b": "freeze"})': updates_to(
        {"w": ADAGRAD_UPDATE["w"], "b": np.array(0.0)}
    ),
    "jax.vjp(loss_fn, params)[1](grad_loss)[0]": equals(
        {k: 2 * g for k, g in GRADS.items()}
    ),
    "gx.apply_gradients(late, grads, late_state, params, local_step=local_step)": (
        accepted_second_step
    ),
    'gx.apply_gradients(tx, {"w": None, "b": None}, state, params)': says(
        ValueError, "no gradient for any leaf"
    ),
    "late.update(grads, late_state, params)": says(TypeError, "needs local_step"),
    "gx.minimize(loss_fn, late)(params, late_state, local_step=local_step)": (
        lambda result: accepted_second_step(result[:2])
    ),
    'gx.minimize(loss_fn, late, trainable={"w": True, "b": False})'
    "(params, late_state, local_step=local_step)": learns_w_alone,
    "gx.global_step(late_state)": equals(1),
    'optax.tree.get(late_state, "stale_count")': equals(0),
    "gx.staleness_fraction(late_state)": equals(0.0),
    'optax.tree.get(late_state, "sum_of_squares")["w"]': equals(ACC["w"]),
    "late_state.inner_state[0]._fields": gives(("sum_of_squares",)),
    "jax.tree.leaves(late_state)": equals([1, 0, 0, ACC["b"], ACC["w"]]),
    # clip_by_global_norm, clip_by_norm
    "gx.clip_by_global_norm(clip_norm)": updates_to(
        {k: g / NORM for k, g in GRADS.items()}
    ),
    "clip.update(grads, clip_state)[0]": equals(
        {k: g / NORM for k, g in GRADS.items()}
    ),
    'optax.tree.get(clip.update(grads, clip_state)[1], "global_norm")': (
        lambda norm: np.testing.assert_allclose(norm, NORM, rtol=1e-7)  # a float32
    ),
    "clip.update(grads, clip_state, use_norm=norm)[0]": equals(
        {k: g / 100 for k, g in GRADS.items()}
    ),
    "optax.chain(clip, optax.apply_if_finite(tx, max_consecutive_errors=5))": (
        skips_what_is_not_finite
    ),
    "gx.global_norm(grads)": equals(NORM),
    "gx.clip_by_norm(clip_norm)": updates_to(
        {"w": GRADS["w"] / np.sqrt(FIRST_NU), "b": GRADS["b"]}
    ),
    "jax.vmap(lambda row: gx.clip_by_norm(1.0).update(row, ())[0])(table)": equals(
        TABLE / np.maximum(1, np.linalg.norm(TABLE, axis=1, keepdims=True))
    ),
    # UPDATE_OPS and regularizers; test_porting.py replays TensorFlow's.
    'optax.partition({"train": gx.drop_stale(tx, 1), "averages": optax.sgd(1.0)}, '
    '{"w": "train", "b": "averages"})': moves_averages_with_every_push,
    "optax.chain(optax.add_decayed_weights(0.01), tx)": updates_to(decayed(0.01)),
    "optax.chain(optax.add_decayed_weights(2 * 0.01), tx)": updates_to(decayed(0.02)),
    'lambda params: 0.01 * jax.numpy.sum(jax.numpy.abs(params["w"]))': (
        lambda loss: equals(0.01 * 6.0)(loss(PARAMS))
    ),
    # ConditionalAccumulator, SyncReplicasOptimizer
    "gx.conditional_accumulator(tx, num_required=2)": acts_on_two(ADAGRAD_UPDATE),
    "gx.conditional_accumulator(optax.identity(), num_required=2)": acts_on_two(GRADS),
    'gx.conditional_accumulator(tx, num_required=2, reduction="sum")': acts_on_two(
        ADAGRAD_UPDATE_OF_THE_SUM
    ),
    'gx.conditional_accumulator(tx, num_required=2, accumulator_dtype="bfloat16")': (
        sums_in_bfloat16
    ),
    "gx.apply_gradients(summing, grads, summing_state, params, local_step=0)": (
        first_step
    ),
    'gx.apply_gradients(summing, {**grads, "b": None}, summing_state, params, '
    "local_step=0)": rests_at_b,
    "gx.apply_gradients(window, grads, window_state, params, "
    "local_step=0, last=True)": first_step,
    'optax.tree.get(summing_state, "num_accumulated")': equals(1),
    "summing_state._replace(global_step=jax.numpy.int32(7))": (
        lambda state: equals((7, 1, GRADS))(
            (gx.global_step(state), state.num_accumulated, state.accumulated)
        )
    ),
    "server.wait(-1, timeout=60)": equals(0),
    "engines.threads(job, checkpoint=folder)": check_resumes,
    "engines.Checkpoint(folder, every_seconds=600)": saves(every_seconds=600),
    "engines.Checkpoint(folder, every_steps=100, every_seconds=None)": saves(
        every_steps=100, every_seconds=None
    ),
    "engines.Checkpoint(folder, max_to_keep=5)": saves(max_to_keep=5),
    "job._replace(pushes=7)": lambda job: check_pushes(job, 7),
    "engines.TensorBoard(logs, run, every_seconds=120.0)": lambda board: board.close(),
    "gx.ParameterServer(params, tx, require_finite=True)": refuses_nan,
    "run.stop()": gives(None),
    # ParameterServerStrategy
    "gx.ParameterServer(params, tx)": takes_late_gradients,
    "engines.threads(job)": check_scheduled,
    "engines.Job(params, tx, [engines.Worker(step_fn)], pushes=4)": (
        lambda job: check_scheduled(engines.simulated(job))
    ),
    "list(run.pushes)": lambda pushes: gives([1, 2, 3, 4])(
        [push.result.global_step for push in pushes]
    ),
    "[push.loss for push in run.pushes]": equals(SCHEDULED_LOSSES, rtol=1e-5),
    "run.counts().pushed == job.pushes": gives(False),  # Nothing has run yet.
    "[engines.Worker(step_fn, dataset_fn(index)) for index in range(2)]": (
        draw_minibatches_of_their_own
    ),
    "engines.ray(job, server_processes=3, server_shardings={"
    '"w": jax.sharding.PartitionSpec("server"), "b": None})': check_scheduled,
    'lambda path, shape: jax.sharding.PartitionSpec("server") '
    "if shape and shape[0] % 3 == 0 else None": lambda shardings: gives((None, 0))(
        ServerLayout.of(
            PARAMS, 3, shardings
        ).cuts  # Of b, and of the three entries of w.
    ),
    "engines.Job(params, tx, [engines.Worker(step_fn, dataset_fn(0))], pushes=2 * 3)": (
        trains_through_epochs
    ),
    "run.server.pull()[0]": lambda params: equals(PARAMS)(
        jax.tree.map(np.float64, params)
    ),
    'gx.apply_gradients(summing, {"w": params["b"], "b": params["b"]}, summing_state, '
    "params, local_step=0)": says(TypeError, r"differ at \['w'\]"),
    # IndexedSlices
    "gx.IndexedSlices(indices, values, table.shape)": lambda slices: equals(DENSE)(
        slices.densify()
    ),
    "slices.values, slices.indices, slices.dense_shape": equals(
        (ROWS, IDS, TABLE.shape)
    ),
    "gx.lookup(table, ids)": equals(TABLE[IDS]),
    'jax.numpy.einsum("bk,bkd->bd", shares, gx.lookup(table, bags))': equals(
        np.stack([2 * TABLE[3] + 0.5 * TABLE[1], TABLE[2]])
    ),
    'gx.value_and_grad(table_loss, tables=["table"])({"table": table}, ids)': (
        lambda result: equals((np.sum(TABLE[IDS] ** 2), DENSE))(
            (result[0], result[1]["table"].densify())
        )
    ),
    "slices.densify()": equals(DENSE),
    "slices.sum_duplicates()": lambda slices: equals(([1, 3, 4], DENSE))(
        (slices.indices.tolist(), slices.densify())
    ),
    "gx.apply_gradients(tx, slices, tx.init(table), table)": steps_on_touched_rows,
    "clip.update(slices, clip_state)[0]": lambda clipped: equals(
        DENSE / np.linalg.norm(DENSE)
    )(clipped.densify()),
    "gx.lazy(optax.sgd(0.1, momentum=0.9))": rests_in_other_rows,
    "gx.lazy(optax.adam(0.1))": rests_in_other_rows,
    "gx.lazy(optax.adam(learning_rate))": rests_in_other_rows,
    'gx.conditional_accumulator(tx, num_required=2, reduction="row_mean")': (
        averages_rows_by_the_pushes_that_held_them
    ),
    "gx.apply_gradients(row_mean, slices, row_mean.init(table), table, local_step=0)": (
        steps_on_touched_rows
    ),
    "gx.IndexedSlices([-1], slices.values[:1], table.shape)": says(
        ValueError, "indices must be in"
    ),
    # Adagrad
    "gx.adagrad(optax.exponential_decay(0.1, 2, 0.5))": trains_as(
        oracles.adagrad,
        learning_rate=lambda t: 0.1 * 0.5 ** (t / 2),
        rtol=1e-6,  # optax computes the rate in float32.
    ),
    "gx.adagrad(lambda count: learning_rate / (1.0 + 0.5 * count.astype(float)))": (
        trains_as(oracles.adagrad, learning_rate=lambda t: 0.1 / (1 + 0.5 * t))
    ),
    "optax.chain(gx.scale_by_adagrad(), optax.add_decayed_weights(0.01), "
    "optax.scale_by_learning_rate(learning_rate))": updates_to(
        {k: ADAGRAD_UPDATE[k] - 0.1 * 0.01 * PARAMS[k] for k in PARAMS}
    ),
    'optax.masked(optax.add_decayed_weights(0.01), {"w": True, "b": False})': (
        updates_to({"w": GRADS["w"] + 0.01 * PARAMS["w"], "b": GRADS["b"]})
    ),
    "tx.init(params)": lambda state: equals({"w": np.full(3, 0.1), "b": 0.1})(
        optax.tree.get(state, "sum_of_squares")
    ),
    'gx.get_config(gx.from_config({"name": "adagrad", "learning_rate": 0.1, '
    '"clipnorm": 1.0}))': gives(
        {"name": "adagrad", "learning_rate": 0.1, "clipnorm": 1.0}
    ),
    "gx.adagrad(learning_rate, clipnorm=1.0, global_clipnorm=1.0)": says(
        ValueError, "at most one of"
    ),
    'gx.from_config({"name": "adagrad", "learning_rate": 0.1, "clip_norm": 1.0})': says(
        ValueError, "clipnorm"
    ),
    "optax.incremental_update(params, averaged, step_size=0.01)": equals(
        {k: 0.01 * p for k, p in PARAMS.items()}
    ),
    "jax.jit(tx.update)": lambda update: equals(ADAGRAD_UPDATE)(
        update(GRADS, gx.adagrad(0.1).init(PARAMS))[0]
    ),
    "optax.inject_hyperparams(gx.adagrad)(learning_rate)": obeys_the_new_rate,
    'optax.tree.get(scheduled_state, "count")': equals(1),
    'optax.tree.get(state, "sum_of_squares")["w"]': equals(ACC["w"]),
    "gx.ScaleByAdagradState._fields": gives(("sum_of_squares",)),
    "jax.tree.leaves(state)": equals([ACC["b"], ACC["w"]]),
    "optax.tree.set(tx.init(trained), sum_of_squares="
    "[v.value for v in model.optimizer.variables[-len(trained):]])": (
        check_goes_on_as_keras
    ),
    "jax.tree.unflatten(jax.tree.structure(state), weights)": (
        lambda state: equals({"b": 7.0, "w": 8.0})(
            optax.tree.get(state, "sum_of_squares")
        )
    ),
    "gx.apply_gradients(tx, grads, state, params)": second_step,
    'gx.minimize(loss_fn, tx, trainable={"w": True, "b": False})(params, state)': (
        learns_w_alone
    ),
    "jax.grad(loss_fn)(params)": equals(GRADS),
    'gx.apply_gradients(tx, {**grads, "b": None}, state, params)': lambda result: (
        learns_w_alone((*result, loss_fn(PARAMS)))
    ),
    # Ftrl
    "gx.ftrl(optax.exponential_decay(0.1, 2, 0.5))": trains_as(
        oracles.ftrl, learning_rate=lambda t: 0.1 * 0.5 ** (t / 2), rtol=1e-6
    ),
    "gx.apply_gradients(ftrl, slices, ftrl.init(table), table)": lambda result: equals(
        ftrl_moves([1, 3])
    )(result[0]),
    "optax.chain(gx.densify(), gx.ftrl(0.1))": moves_every_row,
    "optax.apply_if_finite(gx.ftrl(0.1, l1_regularization_strength=0.5), "
    "max_consecutive_errors=5)": skips_a_step_of_nan,
    'optax.tree.get(ftrl.init(params), "sum_of_squares")["w"]': equals(np.full(3, 0.1)),
    'optax.tree.get(ftrl.init(params), "linear")["w"]': equals(np.zeros(3)),
    "gx.FtrlState._fields": gives(("count", "sum_of_squares", "linear")),
    # Every optimizer
    "optax.adadelta(learning_rate, rho=0.95, eps=1e-8)": replays("Adadelta"),
    "optax.adam(learning_rate)": replays("Adam"),
    "optax.sgd(learning_rate, momentum=0.9)": replays("Momentum"),
    "optax.rmsprop(learning_rate, eps=1e-10, initial_scale=1.0, momentum=0.5, "
    "centered=True)": replays("RMSProp"),
    "optax.adamax(learning_rate)": replays("AdaMax"),
    "optax.adamw(learning_rate, weight_decay=0.1)": replays("AdamW"),
    "optax.chain(optax.sgd(learning_rate, momentum=0.9), "
    "optax.add_decayed_weights(-0.01))": replays("MomentumW"),
    "gx.scale_by_learning_rate(learning_rate)": replays("GradientDescent"),
    "optax.GradientTransformationExtraArgs(tx.init, tx.update)": updates_to(
        ADAGRAD_UPDATE
    ),
    "gx.conditional_accumulator(optax.sgd(1.0), num_required=2)": acts_on_two(
        {k: -g for k, g in GRADS.items()}
    ),
    "jax.vmap(lambda row: optax.projections.projection_l2_ball(row, 1.0))(table)": (
        equals(TABLE / np.maximum(1, np.linalg.norm(TABLE, axis=1, keepdims=True)))
    ),
    # MultiSteps, apply_every
    "gx.accumulate(tx, num_required=2)": acts_on_two(ADAGRAD_UPDATE),
    "gx.accumulate(tx, num_required=lambda step: jax.numpy.where(step < 1, 2, 3))": (
        acts_on_two(ADAGRAD_UPDATE)
    ),
    'gx.accumulate(tx, num_required=2, reduction="sum")': acts_on_two(
        ADAGRAD_UPDATE_OF_THE_SUM
    ),
    "gx.accumulate(tx, num_required=2, skip_nonfinite=True)": acts_on_two(
        ADAGRAD_UPDATE
    ),
    'gx.accumulate(tx, num_required=2, accumulator_dtype="bfloat16")': (
        sums_in_bfloat16
    ),
    "micro.init(params)": lambda state: equals((0, 0, NO_UPDATE))(
        (state.global_step, state.num_accumulated, state.accumulated)
    ),
    "gx.apply_gradients(micro, grads, micro_state, params)": first_step,
    'gx.apply_gradients(micro, {**grads, "b": None}, micro_state, params)': rests_at_b,
    "micro_state.num_accumulated == 0": equals(False),
    "micro_state.num_accumulated": equals(1),
    "gx.global_step(micro_state)": equals(0),
    "micro_state.accumulated": equals(GRADS),
    "micro_state.nonfinite_count": equals(0),
    "micro_state.inner_state": lambda state: equals(
        {k: 0.1 + 0 * g for k, g in GRADS.items()}
    )(optax.tree.get(state, "sum_of_squares")),
    'gx.accumulate(optax.sgd(learning_rate), num_required=2, reduction="sum")': (
        acts_on_two({k: -0.2 * g for k, g in GRADS.items()})
    ),
    "optax.chain(tx, optax.apply_every(2))": keeps_state_push_by_push,
    # NovoGrad
    "optax.chain(gx.densify(), gx.novograd(learning_rate, weight_decay=0.01))": (
        moves_every_row
    ),
    'optax.tree.get(novograd_state, "count")': equals(1),
    'optax.tree.get(novograd_state, "mu")["w"]': equals(
        GRADS["w"] / np.sqrt(FIRST_NU + 1e-8)
    ),
    'optax.tree.get(novograd_state, "nu")["w"]': equals(FIRST_NU),
    "gx.ScaleByNovogradState._fields": gives(("count", "mu", "nu")),
    "gx.apply_gradients(novograd, grads, novograd_state, params)": (
        novograds_second_step
    ),
    'optax.partition({"slow": novograd, "fast": gx.novograd(0.2)}, '
    '{"w": "slow", "b": "fast"})': updates_to(
        {
            "w": -0.1 * GRADS["w"] / np.sqrt(FIRST_NU + 1e-8),
            "b": -0.2 * GRADS["b"] / np.sqrt(GRADS["b"] ** 2 + 1e-8),
        }
    ),
}


# Two kinds of rows need no entry. A number that is refused is named.
CHECKS |= {
    code: says(ValueError, f"^{name[1]} must be in")
    for line, code in rows()
    if "`ValueError`" in line
    and (name := re.fullmatch(r"gx\.\w+\(\w+, (\w+)=[-\d.]+\)", code))
}


def follows_its_oracle(code):
    """The check of a call of an optimizer: its oracle with the same arguments."""
    name = re.match(r"gx\.(\w+)\(", code)[1]
    signature = inspect.signature(getattr(gx, name))
    recorder = types.SimpleNamespace(**{name: signature.bind})
    bound = eval(code, {"gx": recorder, "learning_rate": 0.1})
    return trains_as(oracles.of(name), **bound.arguments)


CODE = [*dict.fromkeys(code for _, code in rows())]
CHECKS |= {
    code: follows_its_oracle(code)
    for code in CODE
    if code not in CHECKS and re.fullmatch(r"gx\.\w+\(learning_rate\b[^()]*\)", code)
}


# What `dir` and the signatures of the originals list, by the heading of each table.
MEMBERS = {
    "`tf.contrib.opt.DropStaleGradientOptimizer`": """staleness use_locking name
        apply_gradients compute_gradients get_name get_slot get_slot_names minimize
        variables GATE_GRAPH GATE_NONE GATE_OP grad_loss var_list gate_gradients
        aggregation_method colocate_gradients_with_ops global_step""",
    "`tf.clip_by_global_norm`": "t_list clip_norm use_norm name axes",
    "`tf.train.FtrlOptimizer`": """learning_rate learning_rate_power
        initial_accumulator_value l1_regularization_strength l2_regularization_strength
        l2_shrinkage_regularization_strength beta use_locking name accum_name
        linear_name clipnorm clipvalue global_clipnorm weight_decay get_slot
        get_slot_names""",
    "Every optimizer of `tf.train` and `tf.contrib.opt`": """AdadeltaOptimizer
        AdagradDAOptimizer AdagradOptimizer AdamOptimizer FtrlOptimizer
        GradientDescentOptimizer MomentumOptimizer Optimizer ProximalAdagradOptimizer
        ProximalGradientDescentOptimizer RMSPropOptimizer SyncReplicasOptimizer
        AGNCustomGetter AGNOptimizer AdaMaxOptimizer AdamGSOptimizer AdamWOptimizer
        AddSignOptimizer DecoupledWeightDecayExtension DropStaleGradientOptimizer
        ElasticAverageCustomGetter ElasticAverageOptimizer ExternalOptimizerInterface
        GGTOptimizer LARSOptimizer LazyAdamGSOptimizer LazyAdamOptimizer
        ModelAverageCustomGetter ModelAverageOptimizer MomentumWOptimizer
        MovingAverageOptimizer MultitaskOptimizerWrapper NadamOptimizer
        PowerSignOptimizer RegAdagradOptimizer ScipyOptimizerInterface ShampooOptimizer
        VariableClippingOptimizer clip_gradients_by_global_norm
        extend_with_decoupled_weight_decay""",
    "`tf.ConditionalAccumulator`": """replicas_to_aggregate total_num_replicas
        variable_averages variables_to_average get_chief_queue_runner
        get_init_tokens_op make_session_run_hook accumulator_ref apply_grad dtype name
        num_accumulated set_global_step take_grad shared_name reduction_type shape""",
    "`tf.IndexedSlices`": """values indices dense_shape dtype device graph name op
        consumers apply_grad apply_indexed_slices_grad take_grad
        take_indexed_slices_grad""",
    "`tf.distribute.ParameterServerStrategy`": """cluster_resolver
        variable_partitioner distribute_datasets_from_function
        experimental_distribute_dataset experimental_distribute_values_from_function
        experimental_local_results extended gather num_replicas_in_sync reduce run scope
        strategy create_per_worker_dataset done fetch join schedule get num_shards
        min_shard_bytes max_shards bytes_per_string max_shard_bytes dataset_fn
        input_options experimental_get_current_worker_index""",
    "`tf.keras.optimizers.Adagrad`": """learning_rate initial_accumulator_value epsilon
        decay clipnorm clipvalue global_clipnorm weight_decay use_ema ema_momentum
        ema_overwrite_frequency loss_scale_factor gradient_accumulation_steps
        jit_compile name use_locking lr add_optimizer_variables add_variable
        add_variable_from_reference add_slot add_weight apply apply_gradients assign
        assign_add assign_sub build exclude_from_weight_decay finalize_variable_values
        from_config get_config get_gradients get_slot get_slot_names get_updates
        get_weights iterations load_own_variables save_own_variables scale_loss
        set_weights stateless_apply update_step variables weights minimize
        aggregate_gradients compute_gradients""",
    "`optax.MultiSteps`": """opt every_k_schedule use_grad_mean should_skip_update_fn
        accumulator_dtype init update gradient_transformation has_updated inner_opt
        mini_step gradient_step inner_opt_state acc_grads skip_state""",
    "`optax.apply_every`": "k count grad_acc",
    "`NovoGrad`": """learning_rate beta1 beta2 beta_1 beta_2 betas epsilon eps
        weight_decay grad_averaging amsgrad use_locking name clipnorm clipvalue
        iterations get_slot get_slot_names compute_gradients apply_gradients minimize
        step zero_grad param_groups add_param_group state_dict load_state_dict lr""",
}


@pytest.mark.parametrize("heading", MEMBERS)
def test_every_member_of_the_originals_has_a_row(heading):
    (table,) = re.findall(
        rf"^## {re.escape(heading)}.*?\n(.*?)(?=^#|\Z)", TABLES, re.M | re.S
    )
    there = " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`(.*?)`", there))))
    assert not set(MEMBERS[heading].split()) - named


def test_every_check_is_of_a_row():
    assert {*CHECKS} <= {*CODE}


ROWS_ON_RAY = [code for code in CODE if "engines.ray(" in code]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")  # Keras's.
@pytest.mark.parametrize("code", [code for code in CODE if code not in ROWS_ON_RAY])
def test_row(code, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    execute(code, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")
def test_a_model_of_keras_goes_on_with_its_schedule(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    named = namespace_of_keras(tmp_path, rate=(0.1, 4, 0.5))
    (code,) = filter(OF_KERAS.search, CODE)
    more = "count=model.optimizer.iterations.value"
    assert f"`{more}`" in TABLES
    check_goes_on_as_keras(named, eval(f"{code[:-1]}, {more})", named))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("code", ROWS_ON_RAY)
def test_row_on_ray(code, tmp_path):
    execute(code, tmp_path)


for mark in ON_RAY:
    test_row_on_ray = mark(test_row_on_ray)


NO_CHECK = """
A migration table has a row with the code {code!r}, and
nothing says what it should give. Add it to CHECKS in tests/test_migration.py:

    {code!r}: equals(expected),

``equals`` compares a result, ``updates_to`` a transformation's first updates,
``trains_as`` its steps with a formula of tests/oracles.py, ``says`` takes an error and
its words. Only a call ``gx.x(learning_rate, ...)``, and a number that the row's text
says to be a ``ValueError``, need no entry."""


def execute(code, tmp_path):
    """Runs the code of a row and checks the result."""
    if code not in CHECKS:
        pytest.fail(NO_CHECK.format(code=code), pytrace=False)
    check = CHECKS[code]
    if OF_ENGINES.search(code):
        with namespace_of_engines(tmp_path) as named:
            check(eval(code, named))
        return
    if OF_KERAS.search(code):
        named = namespace_of_keras(tmp_path)
        check(named, eval(code, named))
        return
    with jax.enable_x64(True):
        if isinstance(check, tuple):
            error, match = check
            with pytest.raises(error, match=match):
                eval(code, namespace(code))
        else:
            check(eval(code, namespace(code)))
