"""The server under many threads, its guards, and what it promises about arrays."""

import collections
import concurrent.futures
import copy
import functools
import gc
import pickle
import threading
import time
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import versions  # Users cannot ask which call is the first.

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: np.float32(rng.standard_normal(p.shape)) for k, p in PARAMS.items()}


def late_sgd(max_staleness=2):
    inner = optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.01))
    return gx.drop_stale(inner, max_staleness)


def server_of(tx=None, params=PARAMS, **options):
    return gx.ParameterServer(params, tx or late_sgd(), **options)


def on_threads(count, work):
    """Runs ``work(index)`` on that many threads; raises what any of them raised."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, index) for index in range(count)]
        return [future.result(timeout=120) for future in futures]


def replay(tx, pushes):
    """The parameters after these gradients, one after the other, none of them late."""
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    params, state = PARAMS, tx.init(PARAMS)
    for number, grads in enumerate(pushes):
        params, state = step(grads, state, params, local_step=np.int32(number))
    return params


@pytest.mark.slow
def test_a_push_with_a_word_that_nobody_reads_changes_nothing():
    """What engines give to any transformation needs no reader."""
    for tx, word, meant in (
        (optax.sgd(0.1), "wieght", "weight"),
        (gx.accumulate(optax.sgd(0.1), 2), "weights", "weight"),
        (gx.drop_stale(optax.sgd(0.1), 1), "wroker", "worker"),
        (gx.drop_stale(optax.sgd(0.1), 1), "tokens", ""),
    ):
        server, grads = server_of(tx), draw(0)
        hint = rf".*Did you mean '{meant}'\?" if meant else ""
        with pytest.raises(TypeError, match=rf"reads the keyword '{word}'{hint}"):
            server.push(grads, 0, **{word: 1.0})
        assert server.stats().accepted == server.stats().dropped == 0
        assert server.push(grads, 0, worker=0, value=1.0).staleness == 0


@pytest.mark.slow
def test_thousands_of_pushes_of_eight_threads_equal_a_serial_replay():
    threads, each = 8, 125
    server = server_of()
    start = threading.Barrier(threads)

    def work(index):
        start.wait()
        log = []
        for number in range(each):
            params, seen = server.pull()
            result = server.push(draw((index, number)), seen)
            assert result.staleness >= 0
            assert np.all(np.isfinite(params["w"]))  # They are still readable.
            log.append((result, (index, number)))
        return log

    log = [entry for part in on_threads(threads, work) for entry in part]
    accepted = [(r.global_step, seed) for r, seed in log if r.applied]
    stats = server.stats()
    assert stats.accepted == len(accepted) == stats.global_step
    assert stats.accepted + stats.dropped == threads * each == len(log)
    assert stats.dropped > 0
    assert sum(stats.staleness.values()) == threads * each
    assert sum(n for late, n in stats.staleness.items() if late > 2) == stats.dropped
    # Every accepted push has a step of its own, and these steps are their order.
    assert sorted(step for step, _ in accepted) == list(range(1, len(accepted) + 1))
    expected = replay(late_sgd(), (draw(seed) for _, seed in sorted(accepted)))
    chex.assert_trees_all_equal(server.pull()[0], expected)


def test_synchronous_training_equals_the_means():
    threads, rounds = 4, 50
    tx = gx.conditional_accumulator(optax.sgd(0.1), threads)
    server = server_of(tx)

    def work(index):
        for number in range(rounds):
            _, seen = server.pull()
            assert seen == number
            assert server.push(draw((index, number)), seen).applied
            assert server.wait(seen, timeout=60) == number + 1

    on_threads(threads, work)
    expected = jax.tree.map(np.float64, PARAMS)
    for number in range(rounds):
        grads = [draw((index, number)) for index in range(threads)]
        for name in expected:
            expected[name] -= 0.1 * np.mean([g[name] for g in grads], axis=0)
    chex.assert_trees_all_close(server.pull()[0], expected, rtol=1e-4, atol=1e-5)
    assert server.stats().dropped == 0


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_pulled_arrays_keep_their_values(donate):
    server = gx.ParameterServer(PARAMS, optax.sgd(0.1), donate=donate)
    pulled = [server.pull()[0]]
    for number in range(5):
        server.push(draw(number), number)
        pulled.append(server.pull()[0])
    expected = [
        replay(gx.drop_stale(optax.sgd(0.1), 9), map(draw, range(n))) for n in range(6)
    ]
    chex.assert_trees_all_close(pulled, expected, rtol=1e-6, atol=1e-6)
    assert not PARAMS["w"].is_deleted()


def test_a_gate_inside_a_chain_is_obeyed_and_its_outside_too():
    """Behind the gate parameters stay; outside of it they may change with any push."""
    tx = optax.chain(gx.drop_stale(optax.sgd(0.1), 0), optax.add_decayed_weights(0.5))
    server = gx.ParameterServer({"w": jnp.ones(2)}, tx)
    server.push({"w": jnp.zeros(2)}, 0)
    assert server.pull()[0]["w"].tolist() == [1.5, 1.5]
    assert server.push({"w": jnp.zeros(2)}, 0)[:3] == (False, 1, 1)
    assert server.pull()[0]["w"].tolist() == [2.25, 2.25]


def test_without_a_gate_every_push_is_accepted():
    server = gx.ParameterServer(PARAMS, gx.adagrad(0.1))
    for number in range(3):
        assert server.push(draw(number), 0)[:3] == (True, number, number + 1)
    assert server.stats().staleness == {0: 1, 1: 1, 2: 1}


def test_parameters_change_where_the_global_step_cannot_grow():
    last = np.iinfo(np.int32).max
    server = gx.ParameterServer({"w": jnp.zeros(())}, gx.drop_stale(optax.sgd(1.0), 9))
    state = server.state()
    state["state"] = state["state"]._replace(global_step=jnp.int32(last))
    server.restore(state)
    for number in range(2):
        assert server.pull() == ({"w": -number}, last)
        assert server.push({"w": jnp.ones(())}, last)[:3] == (True, 0, last)


def test_wait():
    server = server_of()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(server.wait, n % 4, 60) for n in range(16)]
        time.sleep(0.02)
        # One that gives up leaves the others waiting.
        match = r"at step 0 .* global_step=0 .*timeout=0.01"
        with pytest.raises(TimeoutError, match=match):
            server.wait(0, timeout=0.01)
        for number in range(4):
            time.sleep(0.02)
            assert sum(f.done() for f in waiting) == 4 * number
            server.push(draw(number), number)
            done, _ = concurrent.futures.wait(
                [f for n, f in enumerate(waiting) if n % 4 == number], timeout=30
            )
            assert len(done) == 4
    assert [f.result() for f in waiting] == [n % 4 + 1 for n in range(16)]


def test_wait_takes_steps_and_seconds():
    server = server_of()
    for step, timeout, error, match in (
        *((0, x, ValueError, r"timeout must be in \[0, inf\]") for x in (np.nan, -1)),
        (0, "x", TypeError, "timeout must be a real scalar"),
        *(
            (x, 0, TypeError, "global_step must be an integer")
            for x in ("x", 0.5, None)
        ),
    ):
        with pytest.raises(error, match=match):
            server.wait(step, timeout=timeout)
    assert server.wait(-1, timeout=np.inf) == 0
    assert server.wait(np.int32(-1)) == 0


@pytest.mark.slow
def test_a_waiter_that_gives_up_is_forgotten():
    server = server_of()

    def objects_after(timeouts):
        for _ in range(timeouts):
            with pytest.raises(TimeoutError):
                server.wait(0, timeout=0)
        server.stats()  # After the calls before it.
        gc.collect()
        return len(gc.get_objects())

    assert objects_after(timeouts=3) + 100 > objects_after(timeouts=200)


def test_a_deleted_server_leaves_nothing():
    before = {*threading.enumerate()}
    server = server_of()
    server.push(draw(0), server.pull()[1])
    (thread,) = {*threading.enumerate()} - before
    server = weakref.ref(server)
    gc.collect()
    assert server() is None
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_close_wakes_waiters_and_ends_the_service():
    server = server_of()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, server:
        waiting = pool.submit(server.wait, 0)
        time.sleep(0.02)
        server.close()
        with pytest.raises(gx.ServerClosedError, match="parameter server is closed"):
            waiting.result(timeout=30)
    before = server.state()
    for call in (
        server.pull,
        lambda: server.push(draw(0), 0),
        lambda: server.wait(-1),
        lambda: server.restore(before),
    ):
        with pytest.raises(gx.ServerClosedError, match="parameter server is closed"):
            call()
    chex.assert_trees_all_equal(server.state(), before)
    assert server.stats().accepted == 0


BAD = draw(0)
STEP, FINITE = r"local_step must be in \[0, 1\], got", r"finite.*at \['b'\]"
HALF = r"differ in dtype at \['b'\]: grads has float16\[3\], params has float32\[3\]"
DOUBLE = r"grads has float64\[3\], params has float32\[3\]"


@pytest.mark.every
@pytest.mark.parametrize("donate", [True, False])
def test_a_bad_push_is_an_error_and_changes_nothing(donate):
    server = server_of(require_finite=True, donate=donate)
    server.push(draw(1), 0)
    before, stats = server.state(), server.stats()
    for grads, local_step, error, message in (
        ({"w": BAD["w"]}, 1, TypeError, r"differ at \['b'\]"),
        (BAD | {"b": BAD["w"]}, 1, TypeError, r"\['b'\].*float32\[4,3\]"),
        (BAD | {"b": np.float16(BAD["b"])}, 1, TypeError, HALF),
        (BAD | {"b": np.float64(BAD["b"])}, 1, TypeError, DOUBLE),
        ({"w": None, "b": None}, 1, ValueError, "no gradient for any leaf"),
        (BAD | {"b": BAD["b"] * np.nan}, 1, ValueError, FINITE),
        (BAD | {"b": BAD["b"] * np.inf}, 1, ValueError, FINITE),
        (BAD, -1, ValueError, f"{STEP} -1"),
        (BAD, 2, ValueError, f"{STEP} 2"),
        *((BAD, x, TypeError, "local_step must be an integer") for x in (0.5, None)),
    ):
        for _ in range(2):  # The second time it must not pass as compiled.
            with pytest.raises(error, match=message):
                server.push(grads, local_step)
        chex.assert_trees_all_equal(server.state(), before)
        assert server.stats() == stats
    assert server.push(draw(2), 1).applied  # The server goes on.


def test_a_number_of_python_is_called_what_it_is():
    server = server_of(optax.sgd(1.0), jnp.zeros(()))
    with pytest.raises(TypeError, match=r"grads has float64\[\], params has float32"):
        server.push(1.0, 0)
    state = server.state() | {"params": np.float64(0)}
    with pytest.raises(TypeError, match=r"state has float64\[\], the server's state"):
        server.restore(state)


def test_an_error_of_the_transformation_changes_nothing():
    tx = gx.drop_stale(optax.chain(gx.compensate_delay(), optax.sgd(0.1)), 1)
    server = server_of(tx)
    before = server.state()
    with pytest.raises(TypeError, match="needs worker_params"):
        server.push(draw(0), 0)
    chex.assert_trees_all_equal(server.state(), before)


@pytest.mark.slow
def test_a_checkpoint_goes_on_bit_identically(tmp_path):
    server = server_of()
    for number in range(5):
        server.push(draw(number), number)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", server.state())
        checkpointer.wait_until_finished()
        other = gx.ParameterServer(jax.tree.map(jnp.zeros_like, PARAMS), late_sgd())
        saved = checkpointer.restore(tmp_path / "checkpoint", other.state())
    other.restore(saved)
    assert other.pull()[1] == 5
    for number in range(5, 8):
        assert other.push(draw(number), number) == server.push(draw(number), number)
    chex.assert_trees_all_equal(other.state(), server.state())


def test_restore_refuses_a_misfit_and_wakes_waiters():
    server, other = server_of(), server_of()
    server.push(draw(0), 0)
    saved = server.state()
    params = saved["params"]
    for bad, match in (
        (params | {"w": jnp.ones((3, 4))}, r"\['params'\]\['w'\]"),
        (params | {"w": jnp.ones((4, 3), "bfloat16")}, r"dtype at \['params'\]\['w'\]"),
        (params | {"b": None}, r"no array at \['params'\]\['b'\]"),
    ):
        with pytest.raises(TypeError, match=match):
            other.restore(saved | {"params": bad})
    assert other.pull()[1] == 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.wait, 0, 60)
        # It goes by path.
        swapped = collections.OrderedDict((k, params[k]) for k in ("b", "w"))
        other.restore(saved | {"params": swapped})
        assert waiting.result() == 1
    chex.assert_trees_all_equal(other.pull()[0], params)
    assert type(other.pull()[0]) is dict
    # The server keeps copies: what was restored is not donated.
    other.push(draw(1), 1)
    assert not params["w"].is_deleted()
    chex.assert_trees_all_equal(server.state(), saved)


def test_a_push_of_before_a_restore_is_refused():
    server = server_of()
    _, old = server.pull()
    saved = server.state()
    server.push(draw(0), old, push_id=("a", 1))
    server.restore(saved)
    _, new = server.pull()
    assert old == new == 0
    for step in (old, pickle.loads(pickle.dumps(old))):
        with pytest.raises(ValueError, match=r"local_step=0 .* pull again"):
            server.push(draw(0), step)
    with pytest.raises(ValueError, match="pull again"):  # Nor does memory answer.
        server.push(draw(0), old, push_id=("a", 1))
    assert server.wait(old, timeout=0) == 0  # The step it waits for is over.
    assert server.push(draw(0), pickle.loads(pickle.dumps(new))).applied
    assert server.push(draw(1), 1).applied  # A plain integer is believed.
    assert type(new + 1) is int
    # The restore has forgotten the pushes of before.
    server.restore(saved)
    assert server.push(draw(0), 0, push_id=("a", 1))[:3] == (True, 0, 1)
    assert server.stats().accepted == 4


def test_a_restore_wakes_the_waiters_of_the_old_life():
    server = server_of()
    _, seen = server.pull()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.wait, seen, 60)
        by_number = pool.submit(server.wait, 0, 60)
        time.sleep(0.02)
        server.restore(server.state())
        assert waiting.result() == 0
        assert not by_number.done()
        server.push(draw(0), 0)
        assert by_number.result() == 1


# Devices.


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def assert_taken_from_everywhere(server, at):
    """Gradients from any device are taken, and nothing moves."""
    before = shardings(server.state())
    assert before["params"]["w"] == at
    devices, tx = jax.devices(), gx.drop_stale(gx.adagrad(0.1), 9)
    for number, device in enumerate([*devices[:3], devices[0], None]):
        grads = jax.device_put(draw(number), device) if device else draw(number)
        assert server.push(grads, number).applied
        assert shardings(server.state()) == before
        assert shardings(server.pull()[0]) == before["params"]
    expected = replay(tx, map(draw, range(5)))
    chex.assert_trees_all_close(server.pull()[0], expected, rtol=1e-6)
    saved = server.state()
    # By way of the host: otherwise JAX cannot bring back arrays from an explicit mesh.
    host = jax.device_get(saved)
    for elsewhere in (host, jax.device_put(host, devices[5])):
        server.restore(elsewhere)
        assert shardings(server.state()) == before
        chex.assert_trees_all_equal(server.state(), saved)
    assert server.push(jax.device_put(draw(5), devices[4]), 5).applied
    assert shardings(server.state()) == before


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_uncommitted_parameters_stay_so(donate):
    tx = gx.drop_stale(gx.adagrad(0.1), 9)
    server = gx.ParameterServer(PARAMS, tx, donate=donate)
    assert_taken_from_everywhere(server, PARAMS["w"].sharding)
    pulled, _ = server.pull()
    assert not pulled["w"].committed
    # So that a worker on another device calculates there.
    there = jax.device_put(PARAMS["w"], jax.devices()[3])
    assert (pulled["w"] + there).devices() == {jax.devices()[3]}


@pytest.mark.slow
def test_committed_and_sharded_parameters_stay_where_they_are():
    tx = gx.drop_stale(gx.adagrad(0.1), 9)
    committed = jax.device_put(PARAMS, jax.devices()[2])
    server = gx.ParameterServer(committed, tx)
    assert_taken_from_everywhere(server, committed["w"].sharding)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    over, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    sharded = jax.device_put(PARAMS, {"w": over, "b": whole})
    server = gx.ParameterServer(sharded, tx)
    assert_taken_from_everywhere(server, over)


def test_rows_and_extra_arguments_come_from_any_device():
    tx = gx.drop_stale(
        optax.chain(gx.compensate_delay(1.0), gx.scale_by_learning_rate(1.0)), 5
    )
    here, there = jax.devices()[1:3]
    params = {"t": jnp.ones((4, 2))}
    server = gx.ParameterServer(jax.device_put(params, here), gx.drop_stale(tx, 5))
    rows = gx.IndexedSlices([1], jnp.ones((1, 2)), (4, 2))
    grads, worker = jax.device_put(({"t": rows}, params), there)
    assert server.push(grads, 0, worker_params=worker).applied
    assert server.pull()[0]["t"].tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]]


def test_padding_may_hold_anything():
    server = gx.ParameterServer(
        {"t": jnp.zeros((4, 2)), "b": jnp.zeros(())},
        gx.adagrad(0.1),
        require_finite=True,
    )
    values = jnp.array([[1.0, 1.0], [jnp.nan, jnp.inf]])
    grads = {"t": gx.IndexedSlices([1, 4], values, (4, 2)), "b": None}
    assert server.push(grads, 0).applied
    chex.assert_tree_all_finite(server.pull()[0])
    grads = {"t": gx.IndexedSlices([1, 3], values, (4, 2)), "b": None}
    with pytest.raises(ValueError, match=r"finite.*at \['t'\]"):
        server.push(grads, 1)


def test_rows_of_another_precision_are_refused():
    server = gx.ParameterServer({"t": jnp.zeros((4, 2))}, gx.adagrad(0.1))
    rows = gx.IndexedSlices([1], jnp.ones((1, 2), jnp.float16), (4, 2))
    with pytest.raises(TypeError, match=r"dtype at \['t'\]: .*float16\[1,2\]"):
        server.push({"t": rows}, 0)


def test_a_push_that_a_restore_overtakes_is_refused():
    def update(updates, state):
        restores.submit(server.restore, saved).result()  # While the push is compiled.
        return updates

    server = gx.ParameterServer(PARAMS, optax.stateless(update))
    _, seen = server.pull()
    saved = server.state()
    with (
        concurrent.futures.ThreadPoolExecutor(1) as restores,
        pytest.raises(ValueError, match="pull again"),
    ):
        server.push(draw(0), seen)
    chex.assert_trees_all_equal(server.state(), saved)


def test_weak_types_of_gradients_compile_nothing_again():
    compiled = []
    sgd = optax.sgd(1.0)

    def update(updates, state, params=None):
        compiled.append(jax.tree.map(jax.typeof, updates))
        return sgd.update(updates, state, params)

    server = gx.ParameterServer(
        {"w": jnp.ones(3), "b": jnp.ones(())},
        optax.GradientTransformation(sgd.init, update),
    )
    weak = {"w": jnp.full(3, 1.0), "b": jnp.asarray(1.0)}
    strong = jax.tree.map(jnp.float32, jax.tree.map(np.asarray, weak))
    assert all(x.weak_type for x in jax.tree.leaves(weak))
    assert not any(x.weak_type for x in jax.tree.leaves(strong))
    server.push(strong, 0)
    once = len(compiled)
    for grads in (weak, strong):
        server.push(grads, 0)
    assert len(compiled) == once > 0
    for number in (1.0, np.float64(1.0)):  # Also after others were compiled.
        with pytest.raises(TypeError, match=r"grads has float64\[\]"):
            server.push(strong | {"b": number}, 0)
    chex.assert_trees_all_equal(server.pull()[0], {"w": np.full(3, -2.0), "b": -2.0})


def test_a_worker_without_a_row_is_refused():
    tx = optax.chain(gx.worker_mean(optax.sgd(1.0), 2, method="all"), optax.scale(1.0))
    server, grads = server_of(tx, {"w": jnp.ones(2)}), {"w": jnp.ones(2)}
    for bad in (7, -1, 2, np.int32(7), jnp.int32(2)):
        with pytest.raises(ValueError, match=r"worker must be in \[0, 2\), got -?\d"):
            server.push(grads, 0, worker=bad)
    with pytest.raises(TypeError, match=r"worker must be an integer scalar, got 1\.5"):
        server.push(grads, 0, worker=1.5)
    assert server.stats()[:2] == (0, 0)
    server.push(grads, 0, worker=np.int32(1))
    assert server.push(grads, 0, worker=jnp.int32(0)).global_step == 1


def test_it_says_where_it_stands_and_is_not_copied():
    server = server_of()
    result = server.push(draw(0), 0)
    assert repr(server) == "ParameterServer(global_step=1, parameters=15, arrays=2)"
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"restore\(server\.state\(\)\).*an actor"):
            duplicate(server)
    server.close()
    assert repr(server).endswith("arrays=2, ended)")
    # A result is one plain tuple.
    applied, staleness, global_step = result
    assert (applied, staleness, global_step) == (True, 0, 1)
    assert result._replace(staleness=1).global_step == 1
    assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result


CALLS = {
    "pull": lambda server: server.pull(),
    "push": lambda server: server.push(PARAMS, 0),
    "state": lambda server: server.state(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_jax_traces_is_an_error(name):
    """In a compiled function it would run once, and give a constant."""
    server = server_of(optax.sgd(1.0))
    versions._outside.cache_clear()  # It may be the first call of the process.

    def call():
        CALLS[name](server)
        return jnp.zeros(())

    traced = {
        "jit": jax.jit(call),
        "scan": lambda: jax.lax.scan(lambda c, _: (call(), c), 0.0, jnp.arange(2)),
        "cond": lambda: jax.lax.cond(True, call, call),
        "grad": lambda: jax.jit(jax.grad(lambda x: call() * x))(1.0),
        "eval_shape": lambda: jax.eval_shape(call),
    }
    for trace in traced.values():
        with pytest.raises(RuntimeError, match=f"^{name} was called while JAX traces"):
            trace()
    assert server.stats().accepted == 0
    with jax.transfer_guard("disallow"):
        CALLS["pull"](server)  # Outside it is as before.
    jax.vmap(lambda x: call() * x)(jnp.ones(2))  # Here nothing is traced for later.
    with jax.disable_jit():
        jax.jit(call)()


class Described:
    """Looks like an array, and is none."""

    shape, ndim, size, dtype = (3,), 1, 3, np.dtype(np.float32)

    def __array__(self, *_, **__):
        return np.ones(3, np.float32)


class Own(np.ndarray):
    """A subclass without anything of its own."""


B = np.ones(3, np.float32)
# No arrays for JAX, and words of the error.
ODD = {
    "string": ("x", "'x' at {}, which is no array"),
    "long string": ("x" * 1000, "x... at {}, which is no array"),
    "bytes": (b"x", "b'x' at {}, which is no array"),
    "object": (Described(), "Described object at 0x"),
    "description": (jax.eval_shape(lambda: B), "float32) at {}, which is"),
    "big-endian": (B.astype(">f4"), "a ndarray of dtype >f4 at {}, which JAX does not"),
    "masked": (np.ma.masked_array(B, B > 0), "a MaskedArray of dtype float32 at {}, "),
    "objects": (np.full(3, None), "a ndarray of dtype object at {}, which JAX does"),
    "strings": (np.full(3, "x"), "a ndarray of dtype <U1 at {}, which JAX does not"),
    "long double": (B.astype(np.longdouble), "at {}, which JAX does not take: "),
    "time": (np.datetime64("2020"), "a datetime64 of dtype datetime64[Y] at {}, which"),
    "type": (np.float32, "<class 'numpy.float32'> at {}, which is no array"),
    "large": (2**31, "an integer of 32 bits at {}, which JAX does not take: "),
    "huge": (10**5000, "an integer of 16610 bits at {}, which JAX does not take: "),
}
# Arrays for JAX, which may be extra arguments; these two are gradients, too.
EVEN = {
    "subclass": B.view(Own),
    "strided": np.ones((2, 3), np.float32).T[:, 0],
    "number": 3,
    "largest": 2**31 - 1,
    "bool": np.bool_(True),
    "double": np.float64(0.5),
    "half": jnp.bfloat16(0.5),
    "key": jax.random.key(0),
    "none": None,
}


def test_what_is_no_array_for_jax_is_named():
    server = server_of(optax.sgd(1.0))
    sparse = gx.IndexedSlices(jnp.arange(1), jnp.ones((1, 3)), (4, 3))
    for leaf, words in ODD.values():
        for grads in (PARAMS | {"b": leaf}, {"w": sparse, "b": leaf}):
            with pytest.raises(TypeError, match=r"^grads has ") as raised:
                server.push(grads, 0)
            assert words.format("['b']") in str(raised.value)
            assert len(str(raised.value)) < 500
        with pytest.raises(TypeError, match=r"^extra has ") as raised:
            server.push(PARAMS, 0, note={"b": [leaf]})
        assert words.format("['note']['b'][0]") in str(raised.value)
    assert server.stats().accepted == 0


def with_note():
    """SGD, which names a further extra argument."""

    def update(updates, state, params=None, *, note=None):
        return optax.sgd(1.0).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update)


@pytest.mark.slow
def test_what_is_an_array_for_jax_is_taken():
    for kind, leaf in EVEN.items():
        server = server_of(gx.drop_stale(with_note(), 1))
        assert server.push(PARAMS, 0, note={"b": [leaf]}).applied
        if kind in ("subclass", "strided"):
            server.push({"w": None, "b": leaf}, 1)
            expected = PARAMS["b"] - PARAMS["b"] - 1
            np.testing.assert_array_equal(server.state()["params"]["b"], expected)


def test_gradients_that_hold_no_numbers_are_named():
    server = server_of(optax.sgd(1.0))
    grads = jax.tree.map(jnp.copy, PARAMS)
    grads["b"].delete()
    given = jax.jit(lambda x: x + 1, donate_argnums=0)
    lost = jnp.ones(3)
    given(lost)
    cases = [
        (grads, {}, RuntimeError, r"grads has a deleted array at \['b'\], "),
        (PARAMS, {"value": lost}, RuntimeError, r"extra has a deleted .* donated to a"),
        ("x", {}, TypeError, "grads has 'x' at the root, which is no array"),
        (PARAMS, {"value": "x"}, TypeError, r"extra has 'x' at \['value'\]"),
    ]
    for pushed, extra, error, match in cases:
        with pytest.raises(error, match=match):
            server.push(pushed, 0, **extra)

    def traced(scale):
        server.push(jax.tree.map(lambda p: scale * p, PARAMS), 0)
        return scale

    for call in (jax.grad(traced), lambda x: jax.vmap(traced)(jnp.ones(2) * x)):
        with pytest.raises(TypeError, match=r"grads has a traced array at .*vmap"):
            call(1.0)
    assert server.stats().accepted == 0
    server.push(PARAMS, 0)
