"""A server whose arrays lie in parts trains as one whose arrays are whole.

No public name makes such a server in one process, so these tests make it themselves,
with its parts on several devices. ``engines/test_group`` has processes. There a case
takes ten times as long, and no test sees what the compiler has made.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform import engines
from gradxform._ray.layout import ServerLayout
from gradxform._ray.messages import Part
from gradxform._ray.process import Process, made
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.core import of_one_process
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.transport import Transport
from gradxform._trees import maps
from tests.server.test_rows import aligned

COUNT = 4
SHARDINGS = {"table": P("server"), "wide": P(None, "server"), "bias": None}
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


def params_of(height):
    rng = np.random.default_rng(0)
    shapes = {"table": (height, 8), "wide": (6, 12), "bias": (8,)}
    return {k: rng.standard_normal(s, np.float32) for k, s in shapes.items()}


class InParts(Transport):
    """A process of a server that is alone, and so has the parts of all."""

    def __init__(self, params, layout, mesh, tx):
        self.process = Process(engines.Job(params, tx, [], 1), layout, mesh)
        super().__init__(self.process.core)

    def read_newest(self, store):
        snapshot, notes = store.read_newest(self.process.like())
        return self.process.placed(snapshot), notes


def server_of(*process, checkpoint=None):
    return RecoverableServer(InParts(*process), checkpoint)


class Parts:
    """A whole server and one in parts, with the same numbers."""

    def __init__(self, tx, as_function=False):
        self.params = params_of(40)
        mesh = Mesh(np.array(jax.devices()[:COUNT]), ("server",))
        self.layout = ServerLayout.of(self.params, COUNT, SHARDINGS)
        self.given = jax.tree.map(aligned, self.params)
        self.whole = gx.ParameterServer(self.params, tx)
        given = (lambda: dict(self.params)) if as_function else self.given
        self.cut = server_of(given, self.layout, mesh, tx)
        self.rng = np.random.default_rng(1)

    def lying(self, tree, depth=0):
        """The tree with the parts of all processes together."""
        cut_of = self.layout.cut_of()

        def part(path, x):
            cut = cut_of(path[depth:], x)
            return x if cut is None else Part(x, cut)

        return jax.tree.map_with_path(part, tree, is_leaf=maps.is_leaf)

    def grads(self, rows):
        draw = self.rng.standard_normal
        grads = {k: draw(x.shape, np.float32) for k, x in self.params.items()}
        if rows:
            height, width = self.params["table"].shape
            ids = np.append(self.rng.integers(0, height, 6), height)  # With padding.
            table = gx.IndexedSlices(ids, draw((7, width), np.float32), (height, width))
            grads["table"] = table
        return grads

    def push(self, grads, local_step, **extra):
        results = (
            self.whole.push(grads, local_step, **extra),
            self.cut.push(self.lying(grads), local_step, **self.lying(extra, 1)),
        )
        assert results[0] == results[1]
        return results[0]

    def check(self):
        chex.assert_trees_all_close(self.cut.state(), self.whole.state(), **CLOSE)


def partition(tables):
    rest = optax.adafactor(0.1, min_dim_size_to_factor=2)
    labels = {"table": "table", "wide": "rest", "bias": "rest"}
    return optax.partition({"table": tables, "rest": rest}, labels)


CLIP = gx.clip_by_global_norm(1.0)
ROWS = optax.chain(CLIP, partition(gx.adagrad(0.1, row_wise=True)))
SAVED = gx.drop_stale(optax.chain(CLIP, gx.adagrad(0.1)), 2)
CASES = {
    "dense": (optax.chain(CLIP, gx.adagrad(0.1)), False),
    # It looks at the number of rows, and at the sum of each row and of each column.
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), False),
    "rows": (gx.drop_stale(ROWS, 1), True),
    "row_mean": (gx.conditional_accumulator(ROWS, 2, reduction="row_mean"), True),
    "densify": (gx.accumulate(optax.chain(gx.densify(), gx.novograd(0.1)), 2), True),
    "lazy": (gx.lazy(optax.adamw(0.1)), True),
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_one_that_is_whole(case):
    tx, rows = CASES[case]
    both = Parts(tx, as_function=case == "rows")
    for local_step in (0, 1, 0, 0, 2):
        step = both.whole.stats().global_step
        result = both.push(both.grads(rows), min(local_step, step))
    assert result.global_step > 0
    both.check()


@pytest.mark.slow
def test_extra_arguments_are_taken_apart_too():
    tx = optax.chain(gx.compensate_delay(0.5), gx.adagrad(0.1, row_wise=True))
    both = Parts(tx)
    worker_params, _ = both.whole.pull()
    for step, without in enumerate([{}, {"table": None}, {"wide": None}]):
        grads = both.grads(rows=step > 0) | without  # Some leaves have no gradient.
        both.push(grads, step, worker_params=jax.tree.map(np.asarray, worker_params))
    part, seen = both.whole.pull(rows={"table": grads["table"].indices})
    both.push(grads, int(seen), worker_params=part)
    both.check()


def test_the_memory_that_was_given_is_not_taken():
    both = Parts(gx.drop_stale(optax.sgd(1.0), 4))
    before = jax.tree.map(np.copy, (both.params, both.given))
    for step in range(3):
        both.push(both.grads(rows=False), step)
    after = both.params, both.given
    chex.assert_trees_all_equal(before, after)
    # Nor does the server see what its owner does with it later.
    both = Parts(gx.drop_stale(optax.sgd(1.0), 4))
    for x in jax.tree.leaves(both.given):
        x[...] = 7
    both.push(both.grads(rows=False), 0)
    both.check()


# Checkpoints.


TABLE = {"table": params_of(36)["table"], "bias": params_of(36)["bias"]}


def saving(count, folder, params=TABLE):
    """A server that saves itself, in so many parts; a whole one for 0."""
    checkpoint = Checkpoint(folder, every_seconds=None)
    if count:
        layout = ServerLayout.of(params, count, {"table": P("server"), "bias": None})
        mesh = Mesh(np.array(jax.devices()[:count]), ("server",))
        return server_of(params, layout, mesh, SAVED, checkpoint=checkpoint)
    core = of_one_process(params, SAVED)
    return RecoverableServer(Transport(core), checkpoint)


def rows_at(step, height=36):
    rng = np.random.default_rng(step)
    values = rng.standard_normal((6, 8), np.float32)
    return {"table": gx.IndexedSlices(rng.integers(0, 36, 6), values, (height, 8))}


@pytest.mark.slow
def test_any_number_of_parts_reads_the_checkpoint_of_any_other(tmp_path):
    alone = gx.ParameterServer(TABLE, SAVED)
    step = 0
    for incarnation, count in enumerate((0, 4, 3, 0, 2)):
        with saving(count, tmp_path) as server:
            assert server.begin()[1] == step
            assert (server.begin().notes is not None) == (incarnation > 0)
            for _ in range(2):
                rows = rows_at(step) | {"bias": None}
                alone.push(rows, step)
                step = server.push(rows, step, push_id=(0, step)).global_step
            server.save()
            chex.assert_trees_all_close(server.state(), alone.state(), **CLOSE)


# What a push costs.


def compiled(height, rows, tx):
    """The step of a push in one process, and the size of that process's part."""
    table = jax.ShapeDtypeStruct((height, 64), jnp.float32)
    layout = ServerLayout.of({"table": table}, COUNT)
    assert layout.cuts == (0,)
    mesh = Mesh(np.array(jax.devices()[:COUNT]), ("server",))
    params = lambda: {"table": jnp.zeros(table.shape)}  # noqa: E731
    core = Process(engines.Job(params, tx, [], 1), layout, mesh).core
    grads = Part(np.zeros(table.shape, np.float32), 0)
    if rows:
        values = np.zeros((rows, 64), np.float32)
        grads = gx.IndexedSlices(np.arange(rows), values, table.shape)
    step = core.prepare({"table": grads}, {}).step
    return step.args[0], height // COUNT * 64 * 4


def collectives(step):
    text = step.as_text()
    names = "all-reduce", "all-gather", "all-to-all", "collective-permute"
    counts = {x: text.count(f" {x}(") + text.count(f" {x}-start(") for x in names}
    return {name: count for name, count in counts.items() if count}


TABLES = {"whole": gx.adagrad(0.1), "row_wise": gx.adagrad(0.1, row_wise=True)}


@pytest.mark.figures
@pytest.mark.slow
@pytest.mark.parametrize("tables", TABLES)
def test_rows_of_a_push_cost_no_pass_over_the_table(tables):
    tx = optax.chain(CLIP, TABLES[tables])
    (one, part), (twice, _) = (compiled(n, 512, tx) for n in (80_000, 160_000))
    # Each process gets some rows of the accumulator, and no rows of the table.
    assert collectives(one) == {"all-reduce": 1}
    one, twice = (step.memory_analysis() for step in (one, twice))
    assert one.temp_size_in_bytes < 0.15 * part
    assert one.alias_size_in_bytes >= part
    assert twice.temp_size_in_bytes < 1.01 * one.temp_size_in_bytes


@pytest.mark.figures
def test_a_dense_push_moves_the_norm_alone():
    step, part = compiled(80_000, 0, optax.chain(CLIP, gx.adagrad(0.1)))
    assert collectives(step) == {"all-reduce": 1}
    memory = step.memory_analysis()
    assert memory.temp_size_in_bytes < 1.01 * part
    assert memory.alias_size_in_bytes >= 2 * part


def by_columns(height):
    """As the page of large tables makes one."""

    def column(number, table):
        drawn = jax.random.normal(jax.random.fold_in(key, number), (height, 1))
        return jax.lax.dynamic_update_slice(table, drawn, (0, number))

    key = jax.random.key(0)
    return jax.lax.fori_loop(0, 64, column, jnp.zeros((height, 64)))


def made_by_columns(height):
    mesh = Mesh(np.array(jax.devices()[:COUNT]), ("server",))

    def make():
        return {"table": by_columns(height)}

    layout = ServerLayout.of(jax.eval_shape(make), COUNT)
    return made("params", make, layout, mesh).lower().compile()


@pytest.mark.slow
def test_random_numbers_by_columns_are_those_of_one_device():
    got = made_by_columns(800)()["table"]
    np.testing.assert_array_equal(got, by_columns(800))


@pytest.mark.slow
@pytest.mark.figures
def test_random_numbers_by_columns_need_little_beside_the_part():
    compiled, part = made_by_columns(80_000), 80_000 // COUNT * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * part
    assert collectives(compiled) == {}
