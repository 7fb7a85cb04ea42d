"""One of several processes that train one model; ``test_processes`` starts them.

    python -m tests.process_worker PORT COUNT RANK FOLDER

Trains every case and leaves the outcome in ``FOLDER/RANK.GATE.HOW.npz``.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx

# 2 processes divide the first axis between them, and 4 divide the second one as well.
MESH = (2, 4), ("data", "model")
SHAPES = {"in": (8, 16), "bias": (1, 16), "out": (16, 4), "offset": (1, 4)}
SPECS = {
    "in": P("data", "model"),
    "bias": P(None, "model"),
    "out": P("model"),
    "offset": P(),
}


def make(gate, axis_name):
    clip = gx.clip_by_global_norm(1.0, axis_name=axis_name)
    if gate == "accumulator":
        return gx.conditional_accumulator(optax.chain(clip, gx.adagrad(0.05)), 2)
    novograd = gx.novograd(0.05, axis_name=axis_name)
    return gx.drop_stale(optax.chain(clip, novograd), max_staleness=1)


# The local steps of each gate's pushes; two pushes are stale.
GATES = {
    "drop_stale": (0, 0, 0, 2, 1, 3, 4),
    "accumulator": (0, 0, 0, 1, 1, 1, 2, 2, 3),
}
# One gate has the partitioner's collectives. The other has those written here, and so
# has its novograd. ``test_sharded`` has both kinds for each gate, in one process.
CASES = [("accumulator", "jit"), ("drop_stale", "shard_map")]


def train(gate, how, mesh=None):
    """Parameters and state after each push, and its loss; on one device by default."""

    def place(x, spec):
        if mesh is None:
            return jnp.asarray(x)
        # Each process makes the parts that lie on its own devices.
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def step(params, state, x, y, local_step):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y, by_hand)
        params, state = gx.apply_gradients(
            tx, grads, state, params, local_step=local_step
        )
        return params, state, loss

    def check_shardings(*tree):
        if mesh is None:
            return
        leaves = jax.tree.leaves_with_path(tree)
        for (path, x), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
            where = f"{jax.tree_util.keystr(path)}: {x.sharding}, not {spec}"
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), where

    by_hand = mesh is not None and how == "shard_map"
    tx = make(gate, MESH[1] if by_hand else None)
    rng = np.random.default_rng(1)
    params = {
        k: place(np.float32(0.3 * rng.standard_normal(SHAPES[k])), SPECS[k])
        for k in SHAPES
    }
    state = jax.jit(tx.init)(params)
    specs = SPECS, state_specs(tx, state)
    check_shardings(params, state)
    check_shardings(params, tx.init(params))  # init need not be jitted.
    if by_hand:
        batch = P("data"), P("data"), P()
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, *batch), out_specs=(*specs, P())
        )
    step = jax.jit(step, donate_argnums=(0, 1))
    for local_step in GATES[gate]:
        x, y = (rng.standard_normal((16, n), dtype=np.float32) for n in (8, 4))
        x, y = place(x, P("data")), place(y, P("data"))
        params, state, loss = step(params, state, x, y, local_step)
        check_shardings(params, state)
        yield params, state, loss


def state_specs(tx, state):
    """State of a parameter's shape lies as the parameter; scalars lie everywhere."""
    return optax.tree.map_params(
        tx,
        lambda x, spec: spec if x.ndim else P(),
        state,
        SPECS,
        transform_non_params=lambda _: P(),
    )


def loss_fn(params, x, y, by_hand):
    w = params["in"]
    if by_hand:
        w = jax.lax.all_gather(w, "data", tiled=True)
    out = jnp.tanh(x @ w + params["bias"]) @ params["out"]
    if by_hand:
        out = jax.lax.psum(out, "model")
    loss = jnp.mean(jnp.square(out + params["offset"] - y))
    return jax.lax.pmean(loss, "data") if by_hand else loss


def outcome(gate, how="jit", mesh=None):
    """Parameters and state after the last push, all losses: NumPy arrays by name."""
    pushes = list(train(gate, how, mesh))
    params, state, _ = pushes[-1]
    tree = {"params": params, "state": state, "loss": [loss for *_, loss in pushes]}
    if mesh is not None:  # Each process is to have all of it.
        everywhere = NamedSharding(mesh, P())
        tree = jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
    leaves = jax.tree.leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def main(port, count, rank, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(count),
        int(rank),
        coordinator_bind_address=f"127.0.0.1:{port}",
        initialization_timeout=120,
        # They bound how long the others wait for a process that is gone.
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=20,
    )
    assert jax.process_count() == int(count)
    mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2)
    for gate, how in CASES:
        file = pathlib.Path(folder, f"{rank}.{gate}.{how}.npz")
        np.savez(file, **outcome(gate, how, mesh))


if __name__ == "__main__":
    main(*sys.argv[1:])
