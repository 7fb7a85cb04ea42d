"""The server under many threads, its guards, and what it promises about arrays."""

import concurrent.futures
import functools
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import gradxform as gx

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: np.float32(rng.standard_normal(p.shape)) for k, p in PARAMS.items()}


def late_sgd(max_staleness=2):
    inner = optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.01))
    return gx.drop_stale(inner, max_staleness)


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


def test_ten_thousand_pushes_of_eight_threads_equal_a_serial_replay():
    threads, each = 8, 1250
    server = gx.ParameterServer(PARAMS, late_sgd())
    start = threading.Barrier(threads)

    def work(index):
        start.wait()
        log = []
        for number in range(each):
            params, seen = server.pull()
            result = server.push(draw((index, number)), seen)
            assert result.staleness >= 0
            assert np.all(np.isfinite(params["w"]))  # Reads what was pulled before.
            log.append((result, (index, number)))
        return log

    began = time.monotonic()
    log = [entry for part in on_threads(threads, work) for entry in part]
    assert time.monotonic() - began < 120
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
    server = gx.ParameterServer(PARAMS, tx)

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


@pytest.mark.parametrize("donate", [True, False])
def test_what_was_pulled_stays_what_it_was(donate):
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


def test_a_version_is_copied_once():
    server = gx.ParameterServer(PARAMS, gx.drop_stale(optax.sgd(0.1), 0))
    first, _ = server.pull()
    assert server.pull()[0]["w"] is first["w"]
    server.push(draw(0), 0)
    second, _ = server.pull()
    assert second["w"] is not first["w"]
    assert not server.push(draw(0), 0).applied  # Dropped: the version is the same.
    assert server.pull()[0]["w"] is second["w"]


def test_a_gate_inside_a_chain_is_obeyed_and_its_outside_too():
    """Behind the gate parameters stay; outside of it they may change with any push."""
    tx = optax.chain(gx.drop_stale(optax.sgd(0.1), 0), optax.add_decayed_weights(0.5))
    server = gx.ParameterServer({"w": jnp.ones(2)}, tx)
    server.push({"w": jnp.zeros(2)}, 0)
    assert server.pull()[0]["w"].tolist() == [1.5, 1.5]
    assert server.push({"w": jnp.zeros(2)}, 0) == (False, 1, 1)
    assert server.pull()[0]["w"].tolist() == [2.25, 2.25]


def test_without_a_gate_every_push_is_accepted():
    server = gx.ParameterServer(PARAMS, gx.adagrad(0.1))
    for number in range(3):
        assert server.push(draw(number), 0) == (True, number, number + 1)
    assert server.stats().staleness == {0: 1, 1: 1, 2: 1}


def test_extra_arguments_reach_the_transformation():
    tx = gx.drop_stale(optax.chain(gx.compensate_delay(1.0), optax.sgd(1.0)), 5)
    server = gx.ParameterServer({"w": jnp.array([2.0])}, tx)
    worker = {"w": jnp.array([1.5])}
    server.push({"w": jnp.array([1.0])}, 0, worker_params=worker)
    np.testing.assert_allclose(server.pull()[0]["w"], 2.0 - (1.0 + 1.0 * 0.5))


def test_wait():
    server = gx.ParameterServer(PARAMS, late_sgd())
    with pytest.raises(
        TimeoutError, match=r"at step 0 .* global_step=0 .*timeout=0.01"
    ):
        server.wait(0, timeout=0.01)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(server.wait, n % 4, 60) for n in range(16)]
        for number in range(4):
            time.sleep(0.02)
            assert sum(f.done() for f in waiting) == 4 * number
            server.push(draw(number), number)
            done, _ = concurrent.futures.wait(
                [f for n, f in enumerate(waiting) if n % 4 == number], timeout=30
            )
            assert len(done) == 4
    assert [f.result() for f in waiting] == [n % 4 + 1 for n in range(16)]


def test_close_wakes_those_that_wait_and_ends_the_service():
    server = gx.ParameterServer(PARAMS, late_sgd())
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
BAD_PUSHES = {
    "structure": ({"w": BAD["w"]}, 1, TypeError, r"differ at \['b'\]"),
    "shape": (BAD | {"b": BAD["w"]}, 1, TypeError, r"\['b'\].*float32\[4,3\]"),
    "dtype": (
        BAD | {"b": np.float16(BAD["b"])},
        1,
        TypeError,
        r"differ in dtype at \['b'\]: grads has float16\[3\], params has float32\[3\]",
    ),
    "nothing": ({"w": None, "b": None}, 1, ValueError, "no gradient for any leaf"),
    "nan": (BAD | {"b": BAD["b"] * np.nan}, 1, ValueError, r"finite.*at \['b'\]"),
    "inf": (
        BAD | {"w": np.full_like(BAD["w"], np.inf)},
        1,
        ValueError,
        r"finite.*at \['w'\]",
    ),
    "negative": (BAD, -1, ValueError, r"local_step must be in \[0, 1\], got -1"),
    "future": (BAD, 2, ValueError, r"local_step must be in \[0, 1\], got 2"),
    "fraction": (BAD, 0.5, TypeError, "local_step must be an integer"),
    "none": (BAD, None, TypeError, "local_step must be an integer"),
}


@pytest.mark.parametrize("kind", BAD_PUSHES)
def test_a_bad_push_is_an_error_and_changes_nothing(kind):
    grads, local_step, error, message = BAD_PUSHES[kind]
    server = gx.ParameterServer(PARAMS, late_sgd(), require_finite=True)
    server.push(draw(1), 0)
    before, stats = server.state(), server.stats()
    for _ in range(2):  # Nor is it compiled, and let through the second time.
        with pytest.raises(error, match=message):
            server.push(grads, local_step)
    chex.assert_trees_all_equal(server.state(), before)
    assert server.stats() == stats
    assert server.push(draw(2), 1).applied  # It goes on.


def test_an_error_of_the_transformation_changes_nothing():
    tx = gx.drop_stale(optax.chain(gx.compensate_delay(), optax.sgd(0.1)), 1)
    server = gx.ParameterServer(PARAMS, tx)
    before = server.state()
    with pytest.raises(TypeError, match="needs worker_params"):
        server.push(draw(0), 0)
    chex.assert_trees_all_equal(server.state(), before)


def test_a_nan_is_let_through_where_nobody_asked_to_refuse_it():
    server = gx.ParameterServer(PARAMS, optax.sgd(0.1))
    assert server.push(BAD | {"b": BAD["b"] * np.nan}, 0).applied


def test_a_checkpoint_goes_on_bit_identically(tmp_path):
    server = gx.ParameterServer(PARAMS, late_sgd())
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


def test_restore_refuses_what_does_not_fit_and_wakes_those_that_wait():
    server = gx.ParameterServer(PARAMS, late_sgd())
    server.push(draw(0), 0)
    saved = server.state()
    other = gx.ParameterServer(PARAMS, late_sgd())
    bad = jax.tree.map(lambda x: x, saved)
    bad["params"]["w"] = jnp.ones((3, 4))
    with pytest.raises(TypeError, match=r"\['params'\]\['w'\]"):
        other.restore(bad)
    bad["params"]["w"] = jnp.ones((4, 3), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"dtype at \['params'\]\['w'\]"):
        other.restore(bad)
    assert other.pull()[1] == 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.wait, 0, 60)
        other.restore(saved)
        assert waiting.result() == 1
    chex.assert_trees_all_equal(other.pull()[0], saved["params"])
    # The server keeps copies: what was restored is not donated.
    other.push(draw(1), 1)
    assert not saved["params"]["w"].is_deleted()
    chex.assert_trees_all_equal(server.state(), saved)
