"""What a user gives to an engine, and what a run does besides giving pushes."""

import collections
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests.engines.test_endings import list_all, make_job, ones, threads_of

# Minibatches, rows, extra arguments.


def test_each_number_is_drawn_once_and_in_order(engine):
    drawn = collections.defaultdict(list)

    def make_worker(index):
        def batch(number):
            drawn[index].append(number)
            return (np.float32(100 * index + number),)

        return engines.Worker(lambda params, x: (x, jnp.ones_like(params)), batch)

    with engine(make_job([make_worker(index) for index in range(3)])) as run:
        pushes = list(run.pushes)
    assert len(pushes) == 20
    assert all(push.loss == 100 * push.worker + push.number for push in pushes)
    numbers = collections.defaultdict(list)
    for push in pushes:
        numbers[push.worker].append(push.number)
    for worker, given in numbers.items():
        assert given == [*range(len(given))]
        assert drawn[worker][: len(given)] == given


@pytest.mark.slow
def test_rows_of_a_table_are_trained_as_the_whole_table_is(engine):
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    target = np.float32([1.0, -1.0, 2.0, 0.5])

    def loss(params, ids):
        return jnp.mean((gx.lookup(params["table"], ids) @ target - params["b"]) ** 2)

    def batch(number):
        return (np.random.default_rng(number).integers(50, size=8),)

    sparse, seen = jax.jit(gx.value_and_grad(loss, tables=("table",))), []

    def watched(params, ids):
        seen.append(type(params["table"]))
        return sparse(params, ids)

    by_row = engines.Worker(watched, batch, rows=lambda ids: {"table": ids})
    whole = engines.Worker(jax.jit(jax.value_and_grad(loss)), batch)
    params = {"table": jnp.asarray(table), "b": jnp.zeros(())}
    ends = []
    for worker in (by_row, whole):
        job = engines.Job(params, gx.adagrad(0.1), [worker], 25)
        with engine(job) as run:
            norms = [push.norm for push in run.pushes]
            ends.append((run.server.state()["params"], norms))
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)
    assert {*seen} == {gx.TableRows}
    assert not np.array_equal(ends[0][0]["table"], table)


def test_a_transformation_gets_its_extra_arguments(engine):
    tx = gx.drop_stale(optax.chain(gx.compensate_delay(1.0), optax.sgd(0.1)), 10)
    extra = lambda params, x: {"worker_params": params}  # noqa: E731
    gradient = jax.jit(jax.value_and_grad(lambda w, x: (w - x) ** 2))
    worker = engines.Worker(gradient, lambda _: (jnp.float32(1.0),), extra=extra)
    with engine(make_job([worker] * 2, 10, tx)) as run:
        late = [push.result.staleness for push in run.pushes]
        assert run.counts().accepted == 10
        assert 0.2 < run.server.state()["params"] < 1.0
    assert len(late) == 10
    with pytest.raises(TypeError, match="worker_params"):
        list_all(engine, make_job([worker._replace(extra=None)], 10, tx))


@pytest.mark.parametrize("own", [False, True])
def test_a_gate_gets_the_loss_of_each_push(own):
    """The tenth loss is a spike, though its gradient is like the others."""

    def gradient(params, number):
        return 100.0 if number == 9 else 1.0 + 0.01 * (number % 3), jnp.ones_like(
            params
        )

    extra = (lambda params, number: {"value": jnp.float32(1.0)}) if own else None
    worker = engines.Worker(gradient, lambda number: (number,), extra=extra)
    tx = gx.skip_spikes(optax.sgd(1.0), window=8)
    with engines.simulated(make_job([worker], 12, tx)) as run:
        skipped = [push.number for push in run.pushes if not push.result.applied]
    assert skipped == ([] if own else [9])


def test_an_extra_argument_of_a_worker_is_not_lost():
    """The wrapper between the gates passes none on."""
    gate = gx.accumulate(optax.sgd(0.1), 2)

    def update(updates, state, params=None):
        return gate.update(updates, state, params)

    inner = optax.GradientTransformation(gate.init, update)
    worker = engines.Worker(
        lambda params, number: (0.0, params),
        lambda number: (number,),
        extra=lambda params, number: {"weight": 2.0},
    )
    job = make_job([worker], 4, gx.drop_stale(inner, 1))
    with pytest.raises(TypeError, match="weight is for a wrapper inside of test_an"):
        list_all(engines.simulated, job)


def test_a_transformation_without_extra_arguments_is_compiled_once(standard_promotion):
    """Each push has another loss, and a push by hand has none."""
    traced = []

    def update(updates, state, params=None):
        traced.append(updates)
        return updates, state

    worker = engines.Worker(lambda w, n: (float(n), -jnp.ones_like(w)), lambda n: (n,))
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with engines.simulated(make_job([worker], 9, tx)) as run:
        next(run.pushes)
        first = len(traced)
        pushes = [*run.pushes]
        assert len(traced) == first
        params, step = run.server.pull()
        assert run.server.push(jnp.ones_like(params), step).applied
        np.testing.assert_allclose(run.server.pull()[0], params + 1)
    assert [push.loss for push in pushes] == [*range(1, 9)]


def test_any_optimizer_and_any_tree_will_do(engine, standard_promotion):
    params = {"w": jnp.ones((3, 2)), "half": jnp.ones(2, jnp.bfloat16), "none": None}

    def loss(p, x):
        return jnp.sum((x @ p["w"]) ** 2) + jnp.sum(p["half"].astype(float) ** 2)

    gradient = jax.jit(jax.value_and_grad(loss))
    worker = engines.Worker(gradient, lambda _: (jnp.eye(3),))
    job = engines.Job(params, optax.sgd(0.1, momentum=0.5), [worker], 5)
    with engine(job) as run:
        losses = [push.loss for push in run.pushes]
        assert run.counts()[:7] == (5, 5, 0, 0, 0, 0, 0)
        assert run.server.stats().accepted == 5
    assert len({*losses}) == 5
    assert losses == sorted(losses, reverse=True)


def test_the_norm_is_that_of_the_gradients_before_a_clip(engine):
    grads = {"a": np.float32([3.0, 4.0]), "b": np.float32([12.0])}
    params = jax.tree.map(jnp.zeros_like, grads)
    worker = engines.Worker(lambda params: (0.0, jax.tree.map(jnp.asarray, grads)))
    tx = optax.chain(gx.clip_by_global_norm(1.0), optax.sgd(1.0))
    with engine(engines.Job(params, tx, [worker], 3)) as run:
        assert [push.norm for push in run.pushes] == [13.0] * 3
        moved = run.server.state()["params"]
    assert np.allclose(moved["b"], -3 * 12 / 13)


def test_the_results_of_a_worker_are_checked(engine):
    with_aux = jax.value_and_grad(lambda w: (w**2, w), has_aux=True)
    with pytest.raises(TypeError, match="leave has_aux out"):
        list_all(engine, make_job([engines.Worker(with_aux)]))
    bare = engines.Worker(ones, lambda number: jnp.ones(1))
    with pytest.raises(TypeError, match=r"batch: it must give a tuple, .*: return"):
        list_all(engine, make_job([bare]))


LOSSES = {
    "nothing": (lambda p: None, r"got a NoneType: a function from jax\.grad"),
    "an array": (lambda p: p, r"got float32\[\]: a function from jax\.grad"),
    "three": (lambda p: (0.0, None, p), r"got a tuple of 3: a function from jax\.grad"),
    "a dict of two": (
        lambda p: {"a": 0.0, "b": p},
        r"got a dict of 2: a function from jax\.grad",
    ),
    "a vector": (  # As jax.grad gives it, of two parameters.
        lambda p: (jnp.ones(3), p),
        r"got float32\[3\] as the loss: take its mean, .*A function from jax\.grad",
    ),
    "one of NumPy's": (lambda p: (np.ones(1), p), r"got float64\[1\] as the loss"),
    "a complex loss": (lambda p: (jnp.complex64(1j), p), r"got complex64\[\] as the"),
    "a list": (lambda p: ([1.0], p), r"got a list of 1 as the loss: take its mean"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_result_without_loss_and_gradients_is_an_error(engine, name):
    gradient, match = LOSSES[name]
    with pytest.raises(TypeError, match=rf"^gradient: it must give .*{match}"):
        list_all(engine, make_job([engines.Worker(gradient)]))


@pytest.mark.parametrize("loss", [1.5, np.float32(1.5), np.float64(1.5), 2, True])
def test_any_number_is_a_loss(engine, loss):
    worker = engines.Worker(lambda params: [loss, jnp.ones_like(params)])
    assert [push.loss for push in list_all(engine, make_job([worker], 2))] == [loss] * 2


# Durations.


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (-5, ValueError),
        (float("nan"), ValueError),
        (jnp.float32(-0.5), ValueError),
        ("2", TypeError),
        (None, TypeError),
        (np.ones(2), TypeError),
        (1j, TypeError),
    ],
)
def test_an_impossible_duration_is_an_error(engine, given, error):
    worker = engines.Worker(ones)
    durations = worker._replace(duration=lambda n: 1e-3 if n < 3 else given)
    match = r"^duration\(3\) of worker 1, .* must be .*\[0, inf\], got "
    job = make_job([worker._replace(duration=lambda _: 1e-3), durations], 50)
    with pytest.raises(error, match=match) as raised:
        list_all(engine, job)
    assert raised.value.__notes__ == ["Raised by worker 1, for its gradient 3."]


@pytest.mark.parametrize("kind", [int, np.float32, jnp.float32, jnp.bfloat16, np.array])
def test_a_duration_may_be_any_real_number(engine, kind):
    worker = engines.Worker(ones, duration=lambda n: kind(n % 2))
    pushes = list_all(engine, make_job([worker], 4))
    assert {type(push.time) for push in pushes} == {float}
    if engine is engines.simulated:
        assert [push.time for push in pushes] == [0.0, 1.0, 1.0, 2.0]


def test_a_gradient_of_endless_duration_is_waited_for_and_never_comes():
    endless = engines.Worker(ones, duration=lambda _: float("inf"))
    with engines.threads(make_job([engines.Worker(ones), endless], 10**6)) as run:
        assert {next(run.pushes).worker for _ in range(20)} == {0}
        time.sleep(0.1)  # Perhaps the other one has begun only now.
        assert {next(run.pushes).worker for _ in range(20)} == {0}


# Devices.


@pytest.mark.slow
def test_every_device_computes_and_the_parameters_stay(engine):
    devices = jax.local_devices()
    assert len(devices) == 8
    ran, pushed = collections.defaultdict(set), set()
    home = devices[5]
    together = threading.Barrier(8 if engine is engines.threads else 1, timeout=300)

    @jax.jit
    def value_and_grad(w, x):
        return jax.value_and_grad(lambda w: jnp.sum((w - x) ** 2))(w)

    def make_worker(index):
        def gradient(params, x):
            together.wait()  # All at once, if they can.
            loss, grads = value_and_grad(params, x)
            made = jnp.zeros(())  # An array of its own, on no given device.
            ran[index] |= {*params.devices(), *x.devices(), *made.devices()}
            pushed.update(grads.devices())
            return loss, grads

        batch = lambda _: (np.ones(3, np.float32),)  # noqa: E731
        return engines.Worker(gradient, batch, device=devices[index])

    params = jax.device_put(jnp.zeros(3), home)
    tx = gx.drop_stale(gx.adagrad(0.1), 100)
    workers = [make_worker(index) for index in range(8)]
    # No worker may be done before the others reach the barrier.
    job = engines.Job(params, tx, workers, 64, None)
    if engine is engines.threads:
        tx = gx.conditional_accumulator(gx.adagrad(0.1), 8)
        job = engines.Job(params, tx, workers, 64, 8)
    with engine(job) as run:
        pushes = list(run.pushes)
        state = run.server.state()
    assert {push.worker for push in pushes} == {*range(8)}
    assert dict(ran) == {index: {devices[index]} for index in range(8)}
    assert pushed == {*devices}
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {home}
    assert jnp.linalg.norm(state["params"] - 1.0) < jnp.linalg.norm(params - 1.0)


def test_rows_of_a_table_are_computed_on_the_worker_s_device(engine):
    home, there = jax.local_devices()[:2]
    seen = set()
    grad = jax.jit(
        gx.value_and_grad(lambda t, ids: gx.lookup(t, ids).sum(), tables=lambda _: True)
    )

    def gradient(table, ids):
        loss, grads = grad(table, ids)
        seen.update(table.values.devices() | grads.values.devices())
        return loss, grads

    worker = engines.Worker(
        gradient,
        lambda number: (np.array([3, 1, 3]),),
        rows=lambda ids: {"": ids},
        device=there,
    )
    table = jax.device_put(jnp.zeros((5, 2)), home)
    with engine(
        engines.Job(table, optax.chain(gx.densify(), optax.sgd(1.0)), [worker], 2)
    ) as run:
        assert [push.loss for push in run.pushes] == [0.0, -2.0 * (2 + 1 + 2)]
        moved = run.server.state()["params"]
    assert seen == {there}
    assert moved.devices() == {home}
    assert moved.tolist() == [[0, 0], [-2, -2], [0, 0], [-4, -4], [0, 0]]


# Workers that come and go.


def test_workers_come_and_go(engine):
    worker = engines.Worker(ones, duration=lambda _: 1e-3)
    with engine(make_job([worker] * 2, 10**6)) as run:
        pushes = [next(run.pushes) for _ in range(10)]
        assert {push.worker for push in pushes} <= {0, 1}
        threads = threads_of(run)
        assert run.add(worker) == 2
        while pushes[-1].worker != 2:
            pushes.append(next(run.pushes))
        assert pushes[-1].number == 0
        run.remove(0)
        while 0 in run.workers or 0 in {push.worker for push in pushes[-20:]}:
            pushes.append(next(run.pushes))
        assert {push.worker for push in pushes[-20:]} == run.workers.keys() == {1, 2}
        for _ in range(5):  # Some leave before they have begun.
            run.remove(run.add(worker))
        assert run.add(worker) == 8
        while pushes[-1].worker != 8 or run.workers.keys() != {1, 2, 8}:
            pushes.append(next(run.pushes))
        assert run.counts().pushed == len(pushes)
        if threads:
            threads[0].join(60)
        assert [thread.is_alive() for thread in threads] in ([], [False, True])


def test_too_few_workers_are_refused(engine):
    worker = engines.Worker(ones)
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"workers: a step needs 2, got 1"):
        list_all(engine, make_job([worker], tx=tx, required=2))
    with pytest.raises(ValueError, match=r"workers: a step needs 1, got 0"):
        list_all(engine, make_job([]))
    with engine(make_job([worker] * 2, tx=tx, required=2)) as run:
        next(run.pushes)
        with pytest.raises(ValueError, match="fewer than the 2 that a step needs"):
            run.remove(1)
        with pytest.raises(ValueError, match="no worker 7"):
            run.remove(7)
        run.add(worker)
        run.remove(1)
        with pytest.raises(ValueError, match="no worker 1"):
            run.remove(1)
        workers = [push.worker for push in run.pushes]
        # The gradient that it was computing may still come.
        assert workers.count(1) <= 1
        assert {*workers} - {1} == {0, 2}


def test_a_worker_without_a_row_ends_the_run(engine):
    worker = engines.Worker(ones)
    tx = gx.worker_mean(optax.sgd(1.0), 2, method="latest")
    with pytest.raises(ValueError, match=r"^worker must be in \[0, 2\), got 2") as told:
        list_all(engine, make_job([worker] * 3, tx=tx))
    assert told.value.__notes__ == ["Raised by worker 2, for its gradient 0."]
    shares = worker._replace(extra=lambda params: {"worker": 1})
    with engine(make_job([worker, worker, shares], tx=tx)) as run:
        assert run.add(shares) == 3
        assert all(push.result.applied for push in run.pushes)


@pytest.mark.parametrize(
    "changes", [{"pushes": 0}, {"pushes": 2.5}, {"required": 0}, {"pace": 3}]
)
def test_a_job_that_cannot_be_is_refused(engine, changes):
    (name,) = changes
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        list_all(engine, make_job([engines.Worker(ones)])._replace(**changes))


def test_only_workers_are_taken(engine):
    worker = engines.Worker(ones)
    match = r"workers: worker {} must be an engines\.Worker, got .*engines\.Worker\("
    for workers, index in (([ones], 0), ([worker, ones], 1), (worker, 0)):
        with pytest.raises(TypeError, match=match.format(index)):
            list_all(engine, make_job(workers))
    for workers in (3, ones):
        with pytest.raises(TypeError, match="workers must be a sequence of engines"):
            list_all(engine, make_job(workers))
    with engine(make_job([worker])) as run:
        with pytest.raises(TypeError, match=match.format(1)):
            run.add(ones)
        assert {push.worker for push in run.pushes} == {0}


def test_gradients_that_hold_no_numbers_are_named(engine):
    def deleted(params):
        _, grads = ones(params)
        grads.delete()
        return 1.0, grads

    with pytest.raises(RuntimeError, match="grads has a deleted array at the root"):
        list_all(engine, make_job([engines.Worker(deleted)]))
    with pytest.raises(TypeError, match="grads has 'x' at the root, which is no arr"):
        list_all(engine, make_job([engines.Worker(lambda params: (1.0, "x"))]))


# Its end.


def test_one_thread_alone_reads_the_pushes():
    begun, going, done = threading.Event(), threading.Event(), []

    def gradient(params):
        begun.set()
        going.wait()
        return ones(params)

    with engines.threads(make_job([engines.Worker(gradient)])) as run:
        reader = threading.Thread(target=lambda: done.extend(run.pushes))
        reader.start()
        begun.wait()
        with pytest.raises(RuntimeError, match="pushes: another thread or a signal"):
            next(run.pushes)
        going.set()
        reader.join()
        assert len(done) == 20
        assert list(run.pushes) == []


def test_a_run_that_waits_for_a_push_can_be_stopped_by_another_thread():
    worker = engines.Worker(ones, duration=lambda _: 3600.0)
    with engines.threads(make_job([worker])) as run:
        threading.Timer(0.1, run.stop).start()
        assert list(run.pushes) == []
