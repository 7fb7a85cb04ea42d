"""What a server's center counts, and what a resume and a restore make of the counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._server import core, records
from gradxform._server.programs import Prepared

PARAMS = {"w": np.ones(2, np.float32)}
PAIRS = gx.conditional_accumulator(optax.sgd(0.1), 2)


def made(tx=PAIRS, takes=5):
    made = core.of_one_process(PARAMS, tx)
    made.takes, made.numbered = takes, True
    return made


def push(server, *push_id):
    prepared = server.prepare({"w": jnp.ones(2)}, {})
    step = server.version.global_step
    return server.commit(prepared, step, push_id or None)


def test_a_resumed_server_goes_on_where_the_other_stood():
    server, other = made(), made()
    for worker, number in ((7, 0), (7, 1), (2, 0)):
        push(server, worker, number)
    server.ahead = {7: 3}
    other.resume(server.snapshot())
    before, after = server.status(), other.status()
    assert after.incarnation != before.incarnation
    assert after._replace(incarnation=before.incarnation) == before
    assert (after.accumulated, after.tally.pushes) == (1, 3)
    assert other.stats() == server.stats()
    with pytest.raises(ValueError, match="next push of worker 2 has the number 1"):
        push(other, 2, 2)
    assert push(other, 2, 1)[::2] == (True, 2)  # The second of a pair, then the first.
    assert push(other, 5, 0)[::2] == (True, 2)
    for worker, number in ((2, 2), (7, 2), (9, 0)):
        with pytest.raises(records.TakesNoMoreError, match="no more pushes of workers"):
            push(other, worker, number)
    assert push(other)[::2] == (True, 3)  # From outside of the run.


class Leaf:
    """In place of an array that is being computed."""

    def __init__(self):
        self.waits = 0

    def block_until_ready(self):
        self.waits += 1
        return self


@pytest.mark.every
@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_on_several_devices_is_waited_for(devices):
    """One device alone gives the counters; another may still fail."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    server = core.of_one_process(jax.device_put(PARAMS, sharding), optax.sgd(0.1))
    leaves = [Leaf(), Leaf()]
    prepared = Prepared(lambda *_: (leaves, jnp.int32([1, 0])), [])
    assert server.commit(prepared, 0) == (True, 0, 1)
    assert [leaf.waits for leaf in leaves] == [devices - 1] * 2


def test_the_oldest_of_256_programs_makes_room(monkeypatch):
    programs, made_now = made()._programs, []
    monkeypatch.setattr(programs, "_compiled", lambda *given: made_now.append(given))
    grads = {"w": jnp.ones(2)}
    leaves, tree = jax.tree.flatten((grads, {}))
    for others in (255, 256):
        programs._programs = dict.fromkeys(range(others))
        for _ in range(2):  # The second time it is there.
            programs.find(leaves, tree)
        assert len(programs._programs) == 256
        assert (0 in programs._programs) == (others == 255)
        assert 1 in programs._programs
        (signature, *given), *_ = made_now
        assert signature == (tree, (leaves[0].aval,))
        assert given == [grads, {}]


def test_a_restored_server_has_half_a_sum_no_more():
    server, counts = made(), []
    first = server.state()
    for restored in (False, True, False):
        if restored:
            server.restore(first)
        push(server)
        counts.append((server.status().accumulated, server.status().global_step))
    assert counts == [(1, 0), (1, 0), (0, 1)]


@pytest.mark.every
@pytest.mark.parametrize(
    ("tx", "grows"),
    [
        (PAIRS, [False, True, False, True]),
        (optax.sgd(0.1), [True] * 4),
        # What is outside of a gate may change the parameters with any push.
        (optax.chain(PAIRS, optax.add_decayed_weights(0.5)), [True] * 4),
        (optax.chain(optax.clip(1.0), PAIRS), [True] * 4),
    ],
    ids=["gate", "none", "before others", "after others"],
)
def test_an_edition_stands_for_the_same_parameters(tx, grows):
    server, editions = made(tx), []
    for _ in grows:
        before, old = server.version.of_params(), server.state()["params"]["w"]
        push(server)
        is_new = server.version.of_params() != before
        assert is_new or np.array_equal(server.state()["params"]["w"], old)
        editions.append(is_new)
    assert editions == grows
