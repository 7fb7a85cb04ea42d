"""A checkpoint of a server in some parts is good for any other number of parts.

Here the parts are devices of one process; ``test_group`` has processes, on Ray.
"""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._group.checkpoints import described_by
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.layout import Layout
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.sharded import ShardedParams
from gradxform._server.store import Store

pytest.importorskip("orbax.checkpoint")

TABLE = np.random.default_rng(0).standard_normal((41, 8), np.float32)
PARAMS = {"table": TABLE, "bias": np.ones(8, np.float32)}
TX = gx.drop_stale(optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)), 2)


def server_of(count, folder, params=PARAMS):
    """A server in so many parts; a whole one for 0."""
    given = params
    if count:
        layout = Layout.of(params, count, {"table": P("server"), "bias": None})
        mesh = Mesh(np.array(jax.devices()[:count]), ("server",))
        height = layout.padded["table"].shape[0]
        table = np.pad(params["table"], [(0, height - len(params["table"])), (0, 0)])
        given = ShardedParams(params | {"table": table}, layout, mesh)
    checkpoint = Checkpoint(folder, every_seconds=None)
    if isinstance(given, ShardedParams):
        checkpoint = Store(checkpoint, described_by(given))
    return RecoverableServer(given, TX, checkpoint)


def rows(step):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, len(TABLE), 6)
    values = rng.standard_normal((6, 8), np.float32)
    return {"table": gx.IndexedSlices(ids, values, TABLE.shape), "bias": None}


@pytest.mark.slow
def test_any_number_of_processes_reads_the_checkpoint_of_any_other(tmp_path):
    alone = gx.ParameterServer(PARAMS, TX)
    step = 0
    for incarnation, count in enumerate((0, 4, 3, 0, 2)):
        with server_of(count, tmp_path) as server:
            assert server.begin()[1] == step
            assert server.begin().found == (incarnation > 0)
            for _ in range(2):
                alone.push(rows(step), step)
                step = server.push(rows(step), step, push_id=(0, step)).global_step
            server.save()
            both = zip(
                *map(jax.tree.leaves, (alone.state(), server.state())), strict=True
            )
            for wanted, got in both:
                seen = np.asarray(got)[tuple(map(slice, wanted.shape))]
                np.testing.assert_allclose(seen, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("count", [0, 2])
def test_a_checkpoint_of_another_shape_is_another_jobs(count, tmp_path):
    """Even if padding makes it as long as this one."""
    with server_of(3, tmp_path) as server:  # With padding, it holds 42 rows.
        server.begin()
        server.push(rows(0), 0, push_id=(0, 0))
        server.save()
    longer = PARAMS | {"table": np.zeros((42, 8), np.float32)}
    server = server_of(count, tmp_path, longer)
    with pytest.raises(ValueError, match=r"of another job.*\[41,8\].*\[42,8\]"):
        server.begin()
    server.close()
