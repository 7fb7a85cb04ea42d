"""Calls from the host under JAX's settings: without jit, and without hidden transfers.

In a step that is compiled nothing may be transferred: ``test_contract.py`` tests that.
Outside of one, JAX itself refuses ``x * 2`` under ``jax_transfer_guard="disallow"``.
"""

import concurrent.futures
import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests.engines.jobs import make_job, worker

NAMES = {"jax_disable_jit": True, "jax_transfer_guard": "disallow"}


@contextlib.contextmanager
def everywhere(name):
    """A setting of the whole process, as of an environment variable."""
    before = getattr(jax.config, name)
    jax.config.update(name, NAMES[name])
    try:
        yield
    finally:
        jax.config.update(name, before)


SETTINGS = {
    "disable_jit here": jax.disable_jit,
    "transfer_guard here": lambda: jax.transfer_guard("disallow"),
    **{f"{name} everywhere": lambda name=name: everywhere(name) for name in NAMES},
}

TX = gx.drop_stale(optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)), 2)


def params():
    half = jnp.ones(5, jnp.bfloat16)
    return {"table": jnp.ones((8, 2)), "w": jnp.ones(3), "half": half}


def slices(kind):
    return gx.IndexedSlices(kind([1, 3, 1]), kind(np.ones((3, 2), np.float32)), (8, 2))


def gradients():
    """Dense and row-sparse, from a device and from the host."""
    dense = params()
    host = jax.tree.map(np.asarray, dense)
    return [
        dense,
        host,
        dense | {"table": slices(jnp.asarray)},
        host | {"table": slices(np.asarray)},
        dense | {"w": None},
    ]


def use(pushes, start):
    """Every method of a server; returns what they give."""
    with gx.ParameterServer(start, TX, require_finite=True) as server:
        given = [server.push(grads, n) for n, grads in enumerate(pushes[:2])]
        server.restore(server.state())
        _, seen = server.pull()
        given += [server.push(grads, seen) for grads in pushes[2:]]
        given += [server.push(pushes[0], seen), server.wait(0), server.stats()[:3]]
        given += [server.pull(rows={"table": np.array([1, 2, 2])})[0]["table"].values]
        return given, server.state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "main"),
    [*zip(SETTINGS.values(), (True, True, False, False), strict=True)],
)
def test_a_server_works(setting, main):
    pushes, start = gradients(), params()

    def under():
        with setting():
            return use(pushes, start)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        got = under() if main else pool.submit(under).result()
    wanted = use(pushes, start)
    assert [x.applied for x in got[0][:6]] == [True] * 5 + [False]
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)
    assert jax.tree.map(jax.typeof, got[1]) == jax.tree.map(jax.typeof, wanted[1])


@pytest.mark.parametrize(
    ("setting", "engine"),
    [
        *zip(
            SETTINGS.values(),
            (engines.threads, engines.simulated, engines.simulated, engines.threads),
            strict=True,
        )
    ],
)
def test_an_engine_works(setting, engine):
    gradient = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((w - x) ** 2)))
    x, start = jnp.ones(3), jnp.zeros(3)
    workers = [worker(gradient, lambda _: (x,))] * 2
    tx = gx.worker_mean(optax.sgd(0.1), 2, method="latest")
    limit = lambda step: 8 + 0 * step  # noqa: E731
    job = make_job(workers, 9, tx, params=start, max_staleness=limit)
    with setting(), engine(job) as run:
        pushes = list(run.pushes)
    assert len(pushes) == run.counts().accepted == 9
    np.testing.assert_allclose([pushes[0].loss, pushes[0].norm], [1, 2 / 3**0.5], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_for_the_host_need_no_transfer_of_the_caller(dtype):
    tree = {"w": jnp.full((300, 300), 1.0, dtype), "table": slices(jnp.asarray)}
    tx = gx.drop_stale(gx.contrib.momentum_look_ahead(0.5, 0.5), 2)
    w = {"w": jnp.ones(2, dtype)}
    state = tx.init(w)
    for each in SETTINGS.values():
        with each():
            # The rows 1, 1 and 3 hold ones: 2² + 2² + 1² + 1².
            norm = gx.global_norm(tree)
            fraction, step = gx.staleness_fraction(state), gx.global_step(state)
            start = gx.contrib.worker_start(w, state, learning_rate=0.5, b1=0.5)
        np.testing.assert_allclose(norm, np.sqrt(90_010), 1e-6)
        assert (fraction, step) == (0, 0)
        assert start["w"].dtype == dtype
        np.testing.assert_array_equal(start["w"], np.ones(2))
