"""Makes the checkpoints from which every later version goes on: ``checkpoints/*.zip``.

    tests/golden/make_checkpoints.sh

makes those that are missing, with the oldest JAX and optax that are supported.
Each row of ``tests/descriptors.py`` that keeps state has one, unless a row of the same
name before it keeps the same arrays. orbax has saved it as ``docs/sharding.md`` says.
One more is the folder that an engine has left. In each zip ``expected.json`` has the
arrays, their numbers after the next pushes, and the versions that made it.

None is ever made anew. If a test cannot go on from one, a user's run cannot, either:
``docs/versions.md`` says what is promised.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import gradxform as gx
from gradxform import engines
from gradxform._server.folder import LOCK  # A checkpoint leaves it out.
from tests.descriptors import DESCRIPTORS

FOLDER = pathlib.Path(__file__).parent / "checkpoints"
ENGINE = "engine"
SAVED, PUSHES = 3, 5  # Pushes before a checkpoint, and in all.


def draw(seed):
    """A tree with each kind of leaf; its numbers are exact in every dtype."""

    def leaf(*shape, dtype="float32"):
        n = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        return jnp.asarray((3 * n + 5 * seed) % 7 / 4 - 0.5, dtype)

    return {
        "w": leaf(3, 2),
        "half": leaf(2, dtype="bfloat16"),
        "nothing": None,
    }


def kept():
    """The rows that have a checkpoint, by the checkpoint's name."""
    rows = {}
    for row in DESCRIPTORS:
        state = arrays(jax.eval_shape(row.make().init, draw(0)))
        if state:
            rows.setdefault((row.name, *state.items()), row)
    return {str(row): row for row in rows.values()}


def begin(row):
    """Parameters and state before the first push."""
    params = draw(0)
    return params, row.make().init(params)


def pushed(row, params, state, first, last):
    """Parameters and state after the pushes from ``first`` on, up to ``last``."""
    tx = row.make()

    @jax.jit
    def step(params, state, grads, number):
        extra = row.extra(params)
        if "local_step" in extra:
            # Two pushes from each step: some act, some wait and some are stale.
            extra["local_step"] = number // 2
        return gx.apply_gradients(tx, grads, state, params, **extra)

    for number in range(first, last):
        params, state = step(params, state, draw(1 + number), number)
    return params, state


def make_job(pushes):
    """A job for an engine: two workers; the second one is late."""
    tx = gx.drop_stale(gx.adagrad(0.5, global_clipnorm=1.0), 1)

    def loss(params, x):
        return jnp.sum((params["w"] * x - 1) ** 2)

    def make_worker(index, seconds):
        def batch(number):
            return (np.float32([0.5 + index, 1 + number % 4]),)

        gradient = jax.jit(jax.value_and_grad(loss))
        return engines.Worker(gradient, batch, lambda number: seconds)

    workers = [make_worker(0, 1.0), make_worker(1, 2.5)]
    return engines.Job({"w": jnp.zeros(2)}, tx, workers, pushes)


def ran(pushes, folder):
    """Where a job ends after it went on from a folder."""
    checkpoint = engines.Checkpoint(
        folder, every_seconds=None, max_to_keep=1, settings={"seed": 0}
    )
    with engines.simulated(make_job(pushes), checkpoint=checkpoint) as run:
        made = [*run.pushes]
        return run.resumed, len(made), run.counts(), run.server.state()


def arrays(tree):
    """Dtype and shape of each leaf, by its path."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): jax.typeof(x).str_short() for path, x in flat}


def numbers(tree):
    """The numbers of each leaf, by its path, in types that JSON has."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(
            x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None
        ).tolist()
        for path, x in flat
    }


def pack(name, folder, expected):
    """Packs a folder and what is expected of it into one file."""
    with zipfile.ZipFile(FOLDER / f"{name}.zip", "x", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != LOCK:
                file.write(path, path.relative_to(folder))
        made_with = {
            package: importlib.metadata.version(package)
            for package in ("gradxform", "jax", "optax", "orbax-checkpoint")
        }
        expected = {"made_with": made_with} | expected
        file.writestr("expected.json", json.dumps(expected, indent=1))


def make_row(row, folder):
    saved = pushed(row, *begin(row), 0, SAVED)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(SAVED, args=ocp.args.StandardSave(saved))
    after = pushed(row, *saved, SAVED, PUSHES)
    return {"arrays": arrays(saved), "after": numbers(after)}


def make_engine(folder):
    ran(SAVED, folder)
    with tempfile.TemporaryDirectory() as other:
        ran(SAVED, other)
        resumed, made, counts, state = ran(3 * SAVED, other)
    assert made == 2 * SAVED
    counts = {name: n for name, n in counts._asdict().items() if name != "by_worker"}
    return {"resumed": resumed, "counts": counts, "after": numbers(state)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    makers = {
        name: lambda folder, row=row: make_row(row, folder)
        for name, row in kept().items()
    }
    for name, make in (makers | {ENGINE: make_engine}).items():
        if not (FOLDER / f"{name}.zip").exists():
            with tempfile.TemporaryDirectory() as folder:
                pack(name, pathlib.Path(folder), make(pathlib.Path(folder)))
            print(name)
