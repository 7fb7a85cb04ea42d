"""A user's program with every public name: type checkers find the mistakes at its end.

They find no others: ``python -m tests.typing`` compares. Each result has the type that
stands beside it, so none is an ``Any`` by accident. Trees of optax are ``Any``, as
optax says: parameters, updates and states inside of a state.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar, assert_type

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]  # It has no marker py.typed.

import gradxform as gx

Params = dict[str, jax.Array]
S = TypeVar("S")
Wrapper: TypeAlias = optax.GradientTransformationExtraArgs


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2)


def with_aux(params: Params, x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), len(x)


def with_words(
    params: Params, x: jax.Array, y: jax.Array, *, train: bool = True
) -> jax.Array:
    return loss_fn(params, x) if train else loss_fn(params, y)


def start() -> Params:
    return {"w": jnp.ones(3)}


def state_of(tx: optax.GradientTransformation, kind: type[S]) -> S:
    """The state of that class in a fresh state."""
    nodes = jax.tree.leaves(tx.init(start()), is_leaf=lambda x: isinstance(x, kind))
    for node in nodes:
        if isinstance(node, kind):
            return node
    raise AssertionError(f"no {kind}")


def clips_and_scales() -> None:
    tx: list[Wrapper] = [
        gx.clip_by_global_norm(1.0),
        gx.clip_by_norm(1.0),
        gx.compensate_delay(),
        gx.densify(),
        gx.measure_norms(),
        gx.scale_by_adagrad(),
        gx.scale_by_learning_rate(0.1),
        gx.scale_by_novograd(),
        gx.scale_by_staleness(),
        gx.round_stochastically(0),
    ]
    state = state_of(tx[0], gx.ClipByGlobalNormState)
    assert_type(state.global_norm, jax.Array)
    state_of(tx[4], gx.MeasureNormsState)
    state_of(tx[5], gx.ScaleByAdagradState)
    assert_type(state_of(tx[7], gx.ScaleByNovogradState).count, jax.Array)
    assert_type(state_of(tx[9], gx.RoundStochasticallyState).key, jax.Array)
    assert_type(gx.global_norm(start()), jax.Array)


def optimizers() -> None:
    sgd = optax.sgd(0.1)
    tx: list[Wrapper] = [
        gx.adagrad(0.1),
        gx.novograd(optax.constant_schedule(0.1)),
        gx.ftrl(0.1),
        gx.proximal_adagrad(0.1),
        gx.lazy(sgd),
        gx.delayed(sgd, 2),
        gx.low_bit_state(optax.adam(0.1)),
        gx.master_weights(sgd, residual_dtype="int16"),
        gx.whole_matrices(sgd),
        gx.whole_matrices(sgd, {"w": jnp.ones(3).sharding}),
    ]
    config = gx.get_config(gx.from_config({"name": "ftrl", "learning_rate": 0.1}))
    print(config["name"])
    assert_type(state_of(tx[2], gx.FtrlState).count, jax.Array)
    assert_type(state_of(tx[3], gx.ProximalAdagradState).count, jax.Array)
    assert_type(state_of(tx[5], gx.DelayedState).count, jax.Array)
    state_of(tx[6], gx.LowBitState)
    state = state_of(tx[7], gx.MasterWeightsState)
    assert_type(gx.get_master_weights(start(), state), Params)
    assert_type(state.count, jax.Array)


def gates() -> None:
    sgd = optax.sgd(0.1)
    stale: Wrapper = gx.drop_stale(sgd, 4)
    several = assert_type(gx.conditional_accumulator(sgd, 2), Wrapper)
    micro = assert_type(gx.accumulate(sgd, 2), Wrapper)
    mean = assert_type(gx.worker_mean(sgd, 2, method="all"), Wrapper)
    calm = assert_type(gx.skip_spikes(sgd), Wrapper)
    state = state_of(stale, gx.DropStaleState)
    assert_type(state.stale_count, jax.Array)
    assert_type(gx.global_step(state), jax.Array)
    assert_type(gx.staleness_fraction(state), jax.Array)
    for each in (several, micro):
        total = state_of(each, gx.ConditionalAccumulatorState).total_weight
        assert_type(total, jax.Array)
    assert_type(state_of(mean, gx.WorkerMeanState).counts, jax.Array)
    assert_type(state_of(calm, gx.SkipSpikesState).norm, jax.Array)


def single_papers() -> None:
    look_ahead = gx.contrib.momentum_look_ahead(
        0.1, alignment=gx.contrib.MomentumAlignment()
    )
    tx: list[Wrapper] = [
        gx.contrib.clip_by_zscore(),
        gx.contrib.measure_cosine(),
        gx.contrib.delayed_nesterov(0.1, num_delay=2),
        gx.contrib.scale_by_delayed_nesterov(num_delay=2),
        gx.contrib.scale_by_momentum_look_ahead(),
        gx.contrib.scale_by_worker([1.0, 0.5]),
        gx.contrib.cautious(optax.sgd(0.1)),
        look_ahead,
    ]
    assert_type(state_of(tx[0], gx.contrib.ClipByZscoreState).mean, jax.Array)
    assert_type(state_of(tx[1], gx.contrib.MeasureCosineState).cosine, jax.Array)
    state_of(tx[3], gx.contrib.ScaleByDelayedNesterovState)
    state_of(tx[4], gx.contrib.ScaleByMomentumLookAheadState)
    begun = gx.contrib.worker_start(start(), look_ahead.init(start()), 0.1, 0.9)
    assert_type(begun, Params)


def steps() -> None:
    x, tx, params = jnp.ones((4, 3)), gx.adagrad(0.1), start()
    state = assert_type(
        gx.on_host(state_of(tx, gx.ScaleByAdagradState)), gx.ScaleByAdagradState
    )
    params = assert_type(gx.on_host(params), Params)
    assert_type(gx.on_host(params["w"]), jax.Array)
    held = tx.init(params)
    print(gx.abstract_state(tx, params))
    loss, grads = gx.value_and_grad(loss_fn)(params, x)
    assert_type(loss, jax.Array)
    assert_type(grads, Params)
    assert_type(gx.apply_updates(params, grads), Params)
    params, held = gx.apply_gradients(tx, grads, held, params)
    assert_type(params, Params)
    params, held, loss = gx.minimize(loss_fn, tx)(params, held, x)
    assert_type(params, Params)
    assert_type(loss, jax.Array)
    evaluated = gx.evaluate(loss_fn)
    assert_type(evaluated(params, x), jax.Array)
    print(evaluated.lower(params, x).as_text())
    change, held, losses = gx.local_steps(loss_fn, tx)(params, held, x[None])
    assert_type(change, Params)
    assert_type(losses, jax.Array)
    (loss, size), grads = gx.value_and_grad(with_aux, has_aux=True)(params, x)
    print(size + 1)
    params = gx.apply_updates(params, {"w": None})
    step = gx.minimize(with_aux, tx, has_aux=True, donate=False)
    params, held, loss, size = step(params, held, x)
    print(state, loss.item(), grads["w"].sum(), step.lower(params, held, x).as_text())
    train = gx.minimize(with_words, gx.drop_stale(tx, 2), donate=False)
    held = gx.drop_stale(tx, 2).init(params)
    trained, held, loss = train(params, held, x, x, train=False, local_step=0)
    assert_type(trained, Params)
    search = gx.minimize(with_words, optax.lbfgs())
    trained, held, _ = search(trained, optax.lbfgs().init(trained), x, y=x)
    assert_type(trained, Params)


def tables() -> None:
    table, ids = jnp.ones((5, 3)), jnp.array([1, 1])
    slices = gx.IndexedSlices(ids, jnp.ones((2, 3)), (5, 3))
    assert_type(slices.sum_duplicates(), gx.IndexedSlices)
    assert_type(slices.densify(), jax.Array)
    assert_type(slices.dense_shape, tuple[int, ...])
    rows = gx.TableRows(jnp.array([1]), jnp.ones((1, 3)), (5, 3))
    assert_type(rows.values, jax.Array)
    assert_type(gx.lookup(table, ids), jax.Array)
    assert_type(gx.lookup(rows, ids), jax.Array)
    params = {"rows": table}
    _, sparse = gx.value_and_grad(lambda t: t["rows"][0].sum(), tables=["rows"])(params)
    print(sparse["rows"].indices)
    part, _ = gx.ParameterServer(params, gx.adagrad(0.1)).pull({"rows": ids})
    assert_type(gx.lookup(part["rows"], 1), jax.Array)


def server() -> None:
    with gx.ParameterServer(start(), gx.drop_stale(optax.sgd(0.1), 4)) as server:
        params, seen = server.pull()
        assert_type(params, Params)
        assert_type(seen, int)
        result = assert_type(server.push(params, seen), gx.PushResult)
        assert_type(result.applied, bool)
        assert_type(server.wait(0, timeout=9.0), int)
        assert_type(server.stats(), gx.ServerStats)
        server.restore(server.state())
    try:
        server.pull()
    except gx.ServerClosedError as error:
        print(error)


def job() -> gx.engines.Job:
    gradient = jax.value_and_grad(loss_fn)
    worker = gx.engines.Worker(gradient, lambda number: (jnp.ones((4, 3)),))
    paces: list[Callable[[gx.engines.Progress], bool]] = [
        gx.engines.admission(4, 2),
        gx.engines.bounded_staleness(4),
        gx.engines.stale_synchronous(2),
    ]
    tx = gx.drop_stale(optax.sgd(0.1), 4)
    return gx.engines.Job(start(), tx, [worker] * 2, pushes=6, pace=paces[1])


def finish(run: gx.engines.Run) -> None:
    for push in run.pushes:
        assert_type(push, gx.engines.Push)
        assert_type(push.loss, float)
    counts = assert_type(run.counts(), gx.engines.Counts)
    for each in counts.by_worker.values():
        assert_type(each, gx.engines.WorkerCounts)
    server: gx.engines.Server = run.server
    assert_type(server.stats(), gx.ServerStats)
    print(counts.pushed)


def engines() -> None:
    with gx.engines.threads(job()) as run:
        finish(run)
    with gx.engines.simulated(job()) as run:
        finish(run)


def with_further_packages(folder: str) -> None:
    """Checked, and not run."""
    import gradxform.keras

    gradxform.keras.Optimizer(gx.adagrad(0.1))
    checkpoint = gx.engines.Checkpoint(folder, every_steps=10)
    with (
        gx.engines.ray(job(), checkpoint=checkpoint) as run,
        gx.engines.TensorBoard(folder, run) as board,
    ):
        for push in run.pushes:
            board(push)


def main() -> None:
    clips_and_scales()
    optimizers()
    gates()
    single_papers()
    steps()
    tables()
    server()
    engines()


def wrong(params: Params, state: optax.OptState) -> None:
    """Checked, and not run."""
    step = gx.minimize(loss_fn, gx.adagrad(0.1))
    loss = loss_fn(params, jnp.ones((4, 3)))
    loss, params = step(params, state, jnp.ones((4, 3)))[:2]  # a mistake
    pulled, _ = gx.ParameterServer(params, gx.adagrad(0.1)).pull()
    print(loss, pulled.w)  # a mistake
    two = gx.minimize(with_words, gx.adagrad(0.1))
    x = jnp.ones((4, 3))
    two(params, state, x)  # a mistake
    two(params, state, x, x, maks=x)  # a mistake
    gx.local_steps(with_words, gx.adagrad(0.1))(params, state, x)  # a mistake
    gx.value_and_grad(with_words)(params, x)  # a mistake
