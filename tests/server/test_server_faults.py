"""The server among failing steps, stragglers, careless workers and interrupts."""

import concurrent.futures
import contextlib
import functools
import random
import signal
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.conftest import half

# An exception that a signal handler raises in a callback of the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

ONES = {"w": jnp.ones(3)}
UNLUCKY = {"w": jnp.full(3, 13.0)}
BOTH = pytest.mark.parametrize("donate", [True, False])


# JAX 0.12 appends such lines where ``JAX_TRACEBACK_FILTERING`` is off.
LOCATIONS = "\n=== Source Location Trace: ===\njaxlib/py_executable.cc:476"


def raises_on_13(x):
    if x[0] in (13, 14):
        raise ValueError("unlucky" + LOCATIONS * int(x[0] - 13))
    return x


@jax.jit
def called_back(tree):
    """The same tree, by way of a host callback that fails on a 13."""
    return jax.tree.map(
        lambda x: jax.pure_callback(raises_on_13, jax.typeof(x), x), tree
    )


CALLED_BACK = optax.stateless(lambda updates, _: called_back(updates))
FAILING = optax.chain(CALLED_BACK, optax.sgd(0.1))


def server_of(tx=FAILING, params=ONES, **options):
    return gx.ParameterServer(params, gx.drop_stale(tx, 100), **options)


def assert_goes_on(server):
    """The next step gives the numbers that it should give."""
    params, seen = server.pull()
    assert server.push(ONES, seen)[:3] == (True, 0, seen + 1)
    chex.assert_trees_all_close(server.pull()[0]["w"], params["w"] - 0.1, rtol=1e-6)


# A step that fails while it runs.


def on_three_devices(tree):
    """The same parameters, cut: the devices exchange what a callback returns."""
    mesh = jax.make_mesh((3,), ("x",), (AxisType.Auto,), devices=jax.devices()[:3])
    return jax.device_put(tree, NamedSharding(mesh, P("x")))


PLACES = [lambda tree: tree, on_three_devices]


@pytest.mark.parametrize("placed", PLACES)
@pytest.mark.parametrize("number", [13.0, 14.0])
@BOTH
def test_a_failing_step_changes_nothing_or_is_told_to_all_until_a_restore(
    donate, number, placed
):
    server = server_of(params=placed(ONES), donate=donate)
    server.push(ONES, 0)
    saved, stats = server.state(), server.stats()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait, 7, 60) if donate else None
        with pytest.raises(jax.errors.JaxRuntimeError, match="unlucky") as raised:
            server.push({"w": jnp.full(3, number)}, 1)
        if donate:
            assert "has lost its parameters" in raised.value.__notes__[0]
            for call in (
                waiting.result,
                server.pull,
                server.state,
                lambda: server.push(ONES, 1),
                lambda: server.wait(0, timeout=1),
            ):
                with pytest.raises(
                    gx.ServerClosedError, match=r"lost.*RuntimeError.*unlucky.*restore"
                ):
                    call()
            lost = server.stats()
            assert (lost.accepted, lost.global_step) == (1, 1)
            assert lost.lost.endswith("ValueError: unlucky")
            server.restore(saved)
    assert donate or server.stats() == stats
    assert server.stats().lost is None
    chex.assert_trees_all_equal(server.state(), saved)
    assert_goes_on(server)


@BOTH
def test_a_nan_that_the_debugger_stops_changes_nothing(donate):
    server = server_of(optax.sgd(0.1), donate=donate)
    before = server.state()
    nan = {"w": jnp.full(3, jnp.nan)}
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(Exception, match="nan"):  # JAX's own, without a public name.
            server.push(nan, 0)
    finally:
        jax.config.update("jax_debug_nans", False)
    chex.assert_trees_all_equal(server.state(), before)
    assert_goes_on(server)


# Workers.


@pytest.mark.slow
def test_no_push_waits_for_the_gradient_of_a_straggler():
    @jax.jit
    def slow(x):  # The result is x.
        for_long = jnp.ones((400, 400)) * x[0]
        for_long = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), for_long)
        return 0 * for_long[0, :3] + x

    server = gx.ParameterServer(ONES, optax.sgd(0.1))  # Without a gate.
    server.push(ONES, 0)
    slow(ONES["w"]).block_until_ready()  # Compiled.
    late = slow(ONES["w"])
    straggler = threading.Thread(target=server.push, args=({"w": late}, 0))
    straggler.start()
    pushes = 0
    while not late.is_ready():
        server.push(ONES, 0)
        pushes += 1
    straggler.join()
    assert pushes > 10
    assert server.stats().accepted == 2 + pushes


@BOTH
def test_pulled_arrays_may_be_donated(donate):
    server = server_of(optax.sgd(0.1), donate=donate)
    mine, seen = server.pull()
    others, _ = server.pull()
    state = optax.sgd(1.0).init(mine)
    step = gx.minimize(lambda p: jnp.sum(p["w"]), optax.sgd(1.0))
    step(mine, state)
    assert mine["w"].is_deleted()
    assert others["w"].tolist() == [1.0] * 3
    assert server.pull()[0]["w"].tolist() == [1.0] * 3
    assert server.push(others, seen).applied


def test_a_misfit_is_never_traced():
    traced = []

    def update(updates, state, params=None, *, wanted=None, **extra):
        traced.append(updates)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    server = server_of(tx)
    for bad in ({"w": jnp.ones(3, jnp.float16)}, {"w": jnp.ones(4)}, {}):
        for _ in range(3):
            with pytest.raises(TypeError, match="differ"):
                server.push(bad, 0)
    assert not traced
    for step in range(3):
        assert server.push(ONES, step, wanted=np.float32(step)).applied
    assert len(traced) <= 2  # A conditional may look at its branches twice.


CALLS = {
    "pure_callback": lambda f, x: jax.pure_callback(f, jax.typeof(x), x),
    "io_callback": lambda f, x: io_callback(f, jax.typeof(x), x),
    # In a loop, in a branch, and without a result.
    "debug.callback": lambda f, x: jax.lax.fori_loop(
        0, 1, lambda _, y: called(f, y), x
    ),
}


def called(f, x):
    jax.lax.cond(
        x.sum() > -1.0, jax.jit(lambda: jax.debug.callback(f, x)), lambda: None
    )
    return x


@pytest.mark.parametrize("method", ["stats", "pull", "state"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("placed", PLACES)
def test_a_callback_that_asks_its_server_is_told_so(placed, name, method):
    """On several devices another thread calls it, and it would wait for good."""
    asks = []

    def ask(x):
        if asks:
            getattr(asks[0], method)()
        return np.asarray(x)

    def update(u, _):
        return jax.tree.map(functools.partial(CALLS[name], ask), u)

    tx = optax.chain(optax.stateless(update), optax.sgd(0.1))
    server = server_of(tx, placed(ONES), donate=False)
    other = server_of(optax.sgd(0.1))
    asks.append(other)  # It may ask another one.
    assert_goes_on(server)
    asks[0] = server
    before = server.state()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a callback of tx cannot ask"):
        server.push(ONES, 1)
    chex.assert_trees_all_equal(server.state(), before)
    asks.clear()
    assert_goes_on(server)


# Retries.


def test_a_push_that_comes_again_acts_once():
    server = server_of(optax.sgd(0.1))
    first = server.push(ONES, 0, push_id=("a", 1))
    server.push(ONES, 1, push_id=("b", 1))
    before = server.state()
    assert server.push(ONES, 0, push_id=("a", 1)) == first
    assert first[:3] == (True, 0, 1)
    chex.assert_trees_all_equal(server.state(), before)
    assert server.stats().accepted == 2
    assert server.push(ONES, 1, push_id=("a", 2))[:3] == (True, 1, 3)
    # A process that replaces the worker's has pulled later; the first answer is that.
    for local_step in (1, 2, 3):
        again = server.push(ONES, local_step, push_id=("a", 2))
        assert again[:3] == (True, 1, 3)
    with pytest.raises(ValueError, match=r"push_id=\('a', 1\) comes after \('a', 2\)"):
        server.push(ONES, 0, push_id=("a", 1))
    for bad in ("a", ("a",), ("a", 0.5), ([], 1), ["a", 1]):
        with pytest.raises(TypeError, match="push_id"):
            server.push(ONES, 0, push_id=bad)


def test_a_push_that_failed_is_tried_again():
    server = server_of(donate=False)
    with pytest.raises(jax.errors.JaxRuntimeError):
        server.push(UNLUCKY, 0, push_id=("a", 1))
    assert server.push(ONES, 0, push_id=("a", 1)).applied


# Interrupts.


class InterruptError(BaseException):
    """What a signal handler raises here.

    It is no ``Exception``, as Ctrl-C is none: before 0.12, JAX's ``tree.map`` catches
    every ``Exception`` that comes in the middle of it, and fails on its own.
    """


@contextlib.contextmanager
def interrupts(handle, longest):
    """Calls ``handle`` on this thread again and again, at random moments."""
    moments, going = random.Random(0), True

    def again(*_):
        try:
            handle()
        finally:
            if going:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, longest))

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, longest)
    try:
        yield
    finally:
        # Otherwise one on its way would set the timer again. The next one would meet no
        # handler, and that ends the process without a word.
        going = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Interrupted:
    """Runs calls and tries them again: a handler may interrupt each of them once."""

    def __init__(self):
        self.armed = False
        self.count = 0

    def handle(self):
        if self.armed:
            self.armed = False
            self.count += 1
            raise InterruptError

    def until_done(self, call):
        while True:
            try:
                self.armed = True
                result = call()
                self.armed = False
                return result
            except InterruptError:
                pass


@pytest.mark.slow
@BOTH
def test_an_interrupted_push_acts_exactly_once(donate):
    tx = gx.drop_stale(optax.adagrad(0.1), 2)
    server = gx.ParameterServer(ONES, tx, donate=donate)
    server.push(ONES, 0)
    interrupted, pushes = Interrupted(), 1
    with interrupts(interrupted.handle, longest=2e-3):
        while interrupted.count < 50:
            push = functools.partial(server.push, ONES, pushes, push_id=("me", pushes))
            result = interrupted.until_done(push)
            pushes += 1
            assert result[:3] == (True, 0, pushes)
    state, stats = server.state()["state"], server.stats()
    assert pushes == int(state.global_step) == stats.global_step == stats.accepted
    assert (int(state.stale_count), stats.lost) == (0, None)


@pytest.mark.slow
@BOTH
def test_a_signal_handler_may_ask_at_any_moment(donate):
    """It asks the server for everything that it can give."""
    tx = gx.drop_stale(optax.adagrad(0.1), 10**6)
    server = gx.ParameterServer(ONES, tx, donate=donate)
    server.push(ONES, 0)
    asked = []

    def handle():
        state, stats = server.state(), server.stats()
        pulled, seen = server.pull()
        # The interrupted push may come to its end meanwhile.
        assert int(state["state"].global_step) <= stats.global_step <= seen
        chex.assert_tree_all_finite((state, pulled))
        assert server.push(ONES, seen).applied
        asked.append(seen)

    pushes = 1
    with interrupts(handle, longest=5e-3):
        while len(asked) < 30:
            _, seen = server.pull()
            assert server.push(ONES, seen).applied
            pushes += 1
    assert server.stats().accepted == pushes + len(asked)
    assert int(server.state()["state"].global_step) == pushes + len(asked)


# All at once.

GATES = {
    "drop_stale": lambda tx: gx.drop_stale(tx, 3),
    "accumulator": lambda tx: gx.conditional_accumulator(tx, 4),
    "none": lambda tx: tx,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "donate", "require_finite"),
    half(list(GATES), [True, False], [True, False]),
)
def test_sixteen_threads_and_failures_of_every_kind(gate, donate, require_finite):
    options = {"donate": donate, "require_finite": require_finite}
    # A failing step would take donated arrays along, so with donation no step fails.
    tx = GATES[gate](optax.sgd(0.0))
    if not donate:
        tx = optax.chain(CALLED_BACK, tx)
    server = gx.ParameterServer(ONES, tx, **options)
    devices, each = jax.devices(), 6
    nan = {"w": jnp.full(3, jnp.nan)}
    step = gx.minimize(lambda p: jnp.sum(p["w"]), optax.sgd(1.0))

    def refused(error, match, grads, seen):
        with pytest.raises(error, match=match):
            server.push(grads, seen)
        return []

    def good(params, seen, index):
        return [server.push(ONES, seen)]

    def elsewhere(params, seen, index):
        return [server.push(jax.device_put(ONES, devices[index % 8]), seen)]

    def careless(params, seen, index):
        step(params, optax.sgd(1.0).init(params))
        return [server.push(ONES, seen)]

    def wrong(params, seen, index):
        half = {"w": np.ones(3, np.float16)}
        return refused(TypeError, "differ in dtype", half, seen)

    def not_a_number(params, seen, index):
        if not require_finite:
            return []
        return refused(ValueError, "grads must be finite", nan, seen)

    def fails(params, seen, index):
        if donate:  # The step does not fail; the pushed array is gone.
            gone = jax.tree.map(jnp.copy, ONES)
            gone["w"].delete()
            return refused(RuntimeError, "deleted", gone, seen)
        return refused(jax.errors.JaxRuntimeError, "unlucky", UNLUCKY, seen)

    kinds = [good, elsewhere, careless, wrong, not_a_number, fails]

    def work(index):
        results = []
        for number in range(each):
            params, seen = server.pull()
            assert np.isfinite(params["w"]).all()
            results += kinds[(index + number) % len(kinds)](params, seen, index)
        return results

    # The first push traces, and JAX does not survive an interrupt while it does.
    interrupted, results = Interrupted(), [server.push(ONES, 0)]
    with concurrent.futures.ThreadPoolExecutor(15) as pool:
        futures = [pool.submit(work, index) for index in range(15)]
        with interrupts(interrupted.handle, longest=2e-3):
            for number in range(10):
                _, seen = interrupted.until_done(server.pull)
                push = functools.partial(server.push, ONES, seen, push_id=(0, number))
                results.append(interrupted.until_done(push))
        results += [r for f in futures for r in f.result(timeout=60)]
    stats, state = server.stats(), server.state()["state"]
    assert stats.accepted + stats.dropped == len(results) == 1 + 10 + 15 * 3
    assert stats.accepted == sum(r.applied for r in results)
    assert sum(stats.staleness.values()) == len(results)
    steps = stats.accepted // (4 if gate == "accumulator" else 1)
    assert stats.global_step == int(gx.global_step(state)) == steps
    assert gate != "none" or stats.dropped == 0
    assert stats.lost is None


def test_pushes_that_wait_for_the_compiler_use_its_program(bounded):
    traced, compiling, go_on = [], threading.Event(), threading.Event()

    def update(updates, _):
        traced.append(updates)
        compiling.set()
        go_on.wait()
        return updates

    def push(server):
        return server.push(ONES, 0)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        server = server_of(optax.stateless(update))
        pushes = [pool.submit(push, server)]
        compiling.wait()
        pushes.append(pool.submit(push, server))
        time.sleep(0.1)  # Now one compiles and the other one waits for it.
        go_on.set()
        assert all(push.result().applied for push in pushes)
    together = len(traced)  # A conditional may look at its branches twice.
    push(server_of(optax.stateless(update)))
    assert together == len(traced) - together


@pytest.mark.every
@pytest.mark.parametrize("paired", [True, False])
def test_lookahead_is_refused_at_once(paired):
    """And not by the first push, whose worker cannot help it."""
    params = {"w": jnp.ones(2)}
    pair = optax.LookaheadParams.init_synced(params)
    tx = gx.drop_stale(optax.lookahead(optax.sgd(0.1), 2, 0.5), 1)
    with pytest.raises(TypeError, match="the optimizer without lookahead"):
        gx.ParameterServer(pair if paired else params, tx)
