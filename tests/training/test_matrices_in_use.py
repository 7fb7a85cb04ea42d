"""Whole matrices where users put them: wrappers, loops, other entries, checkpoints.

The optimizers keep matrices in their state. The expected numbers are those of the same
steps on one device, without ``whole_matrices``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import jaxprs
from gradxform._matrices import due
from tests import in_numpy
from tests.conftest import pairwise
from tests.training.matrix_optimizers import (
    fitted_at_once,
    kron,
    root_by_newton,
    shampoo,
    soap,
)
from tests.training.test_matrix_optimizers import close
from tests.training.test_whole_matrices import (
    collectives,
    draw,
    mesh,
    placed_state,
    places,
    step_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPES = {"w": (8, 8, 12), "v": (8, 12, 8), "b": (6,)}
SPECS = {"w": P(None, "x", "y"), "v": P(None, "y", "x"), "b": P()}
STEPS = 6
OPTIMIZERS = {
    "soap": soap,
    "kron": kron,
    "shampoo": functools.partial(shampoo, root=root_by_newton),
}
TOLERANCE = {"soap": 3e-4, "kron": 1e-5, "shampoo": 1e-5}
MATRICES = {"w": True, "v": True, "b": False}
GROUPS = {"w": "matrices", "v": "matrices", "b": "others"}


def of_matrices(where):
    """Where parameters lie, for a transformation that sees the matrices alone."""
    if where is None:
        return None
    return where | {"b": optax.MaskedNode()}


def scaled(tx, rate):
    return optax.chain(tx, optax.scale(rate))


def with_rate(tx, rate):
    """``rate`` is a hyperparameter of the state, constant or of a schedule."""

    def make(rate):
        return scaled(tx, rate)

    return optax.inject_hyperparams(make)(rate)


def partitioned(tx):
    return optax.partition({"matrices": tx, "others": optax.adam(0.1)}, GROUPS)


DECAY = optax.linear_schedule(1.0, 0.1, STEPS)


# Each gets ``whole``, which is the identity for the expected numbers, an optimizer,
# and where the parameters lie.
def use(around=lambda tx: tx, inside=lambda tx: tx, where=lambda where: where):
    return lambda whole, tx, there: around(whole(inside(tx), where(there)))


CLIP = optax.clip_by_global_norm(1.0)
USES = {
    "alone": use(),
    "chain around": use(lambda tx: optax.chain(CLIP, tx, optax.scale(0.5))),
    "chain inside": use(
        inside=lambda tx: optax.chain(
            CLIP, optax.trace(0.9), tx, optax.add_decayed_weights(0.1)
        )
    ),
    "partition around": use(partitioned, where=of_matrices),
    "partition inside": use(inside=partitioned),
    "masked around": use(lambda tx: optax.masked(tx, MATRICES), where=of_matrices),
    "masked inside": use(inside=lambda tx: optax.masked(tx, MATRICES)),
    "hyperparameter around": use(lambda tx: with_rate(tx, 0.5)),
    "hyperparameter inside": use(inside=lambda tx: with_rate(tx, 0.5)),
    "schedule around": use(lambda tx: with_rate(tx, DECAY)),
    "schedule inside": use(inside=lambda tx: with_rate(tx, DECAY)),
    "drop_stale around": use(lambda tx: gx.drop_stale(tx, max_staleness=1)),
    "drop_stale inside": use(inside=lambda tx: gx.drop_stale(tx, max_staleness=1)),
    "accumulate around": use(lambda tx: gx.accumulate(tx, 2)),
    "accumulate inside": use(inside=lambda tx: gx.accumulate(tx, 2)),
    "apply_if_finite around": use(lambda tx: optax.apply_if_finite(tx, 2)),
    "apply_if_finite inside": use(inside=lambda tx: optax.apply_if_finite(tx, 2)),
    "master_weights around": use(gx.master_weights),
    "master_weights inside": use(inside=gx.master_weights),
    "MultiSteps around": use(
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation()
    ),
}


class Training:
    """Six pushes on a mesh and on one device. Two of them are stale."""

    def __init__(self, use, optimizer, axis_type=AxisType.Auto, dtype=jnp.float32):
        self.mesh = mesh((4, 2), axis_type)
        self.where = places(SPECS, self.mesh)
        said = self.where if axis_type == AxisType.Auto else None
        make = OPTIMIZERS[optimizer]
        self.inner = USES[use](lambda tx, _: tx, make(), None)
        self.tx = USES[use](gx.whole_matrices, make(), said)
        self.plain = jax.device_get(draw(SHAPES, dtype=dtype))
        self.pushes = jax.device_get([draw(SHAPES, n, dtype) for n in range(1, 7)])
        self.is_around = "around" in use  # A gate inside leaves other sums behind.
        self.local_steps = [0, 1, 0, 0, 3, 3] if "drop_stale" in use else None
        self.params = jax.device_put(self.plain, self.where)

    def push(self, tx, params, state, grads, local_step=None):
        extra = {} if local_step is None else {"local_step": local_step}
        if self.is_around:
            return gx.apply_gradients(tx, grads, state, params, **extra)
        updates, state = optax.with_extra_args_support(tx).update(
            grads, state, params, **extra
        )
        return gx.apply_updates(params, updates), state

    def run(self, step, params, state, pushes):
        now = params, state
        for n, grads in enumerate(pushes):
            now = step(*now, grads, self.local_steps and self.local_steps[n])
        return jax.device_get(now)

    def expected(self):
        step = in_numpy.jit(functools.partial(self.push, self.inner))
        return self.run(step, self.plain, self.inner.init(self.plain), self.pushes)

    def state(self, by_matrix=True):
        tx = self.tx if by_matrix else self.inner
        return placed_state(tx, self.params, self.inner.init(self.plain))

    def actual(self, state):
        """The last parameters and state, pinned to where they began."""
        here = jax.tree.map(lambda x: x.sharding, (self.params, state))
        step = jax.jit(functools.partial(self.push, self.tx), out_shardings=here)
        pushes = [jax.device_put(grads, self.where) for grads in self.pushes]
        return self.run(step, self.params, state, pushes)


TYPES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


# Each use has one of the three optimizers.
CASES = [x for k, x in enumerate(pairwise(USES, OPTIMIZERS)) if k % 3 == k // 3 % 3]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer", "by_matrix", "is_explicit"), CASES)
def test_wrappers(name, optimizer, by_matrix, is_explicit):
    training = Training(
        name, optimizer, TYPES["explicit" if is_explicit else "automatic"]
    )
    with jax.set_mesh(training.mesh):
        actual = training.actual(training.state(by_matrix))
    close(actual, training.expected(), TOLERANCE[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("axes", TYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scan_of_steps(optimizer, axes):
    """Bases and roots are computed again within it."""
    training = Training("chain around", optimizer, TYPES[axes])

    def steps(params, state, pushes):
        def one(now, grads):
            return training.push(training.tx, *now, grads), None

        return jax.lax.scan(one, (params, state), pushes)[0]

    pushes = jax.tree.map(lambda *x: np.stack(x), *training.pushes)
    stacked = jax.tree.map(
        lambda x, there: jax.device_put(
            x, NamedSharding(there.mesh, P(None, *there.spec))
        ),
        *(pushes, training.where),
    )
    with jax.set_mesh(training.mesh):
        state = training.state()
        here = jax.tree.map(lambda x: x.sharding, (training.params, state))
        step = jax.jit(steps, donate_argnums=(0, 1), out_shardings=here)
        actual = jax.device_get(step(training.params, state, stacked))
    close(actual, training.expected(), TOLERANCE[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("axes", TYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_jit(optimizer, axes):
    training = Training("alone", optimizer, TYPES[axes])
    training.pushes = training.pushes[:3]
    with jax.set_mesh(training.mesh):
        now = training.params, training.state()
        for grads in training.pushes:
            now = training.push(
                training.tx, *now, jax.device_put(grads, training.where)
            )
    close(jax.device_get(now), training.expected(), TOLERANCE[optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("axes", TYPES)
def test_two_updates_in_one_program(axes):
    """Of two optimizers; the second one goes on where the first one ended."""
    first, second = (Training("alone", name, TYPES[axes]) for name in ("soap", "kron"))

    def both(one, other, params, states, grads):
        params, state = first.push(one, params, states[0], grads)
        params, last = first.push(other, params, states[1], grads)
        return params, (state, last)

    def run(params, states, pushes, *txs):
        step = jax.jit(functools.partial(both, *txs))
        for grads in pushes:
            params, states = step(params, states, grads)
        return jax.device_get((params, states))

    with jax.set_mesh(first.mesh):
        pushes = [jax.device_put(grads, first.where) for grads in first.pushes]
        states = first.state(), second.state()
        actual = run(first.params, states, pushes, first.tx, second.tx)
    inner = first.inner, second.inner
    states = tuple(tx.init(first.plain) for tx in inner)
    close(actual, run(first.plain, states, first.pushes, *inner), 3e-4)


def described(tree):
    return [
        (x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, jax.tree.leaves(tree))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("axes", TYPES)
@pytest.mark.parametrize("name", ["alone", "chain around", "drop_stale around"])
def test_states_before_the_first_step(name, axes):
    """Made with ``jit`` and without, described by JAX and by the library."""
    training = Training(name, "soap", TYPES[axes])
    tx, params = training.tx, training.params
    expected = described(training.inner.init(training.plain))
    with jax.set_mesh(training.mesh):
        like = gx.abstract_state(tx, params)
        there = jax.tree.map(lambda x: x.sharding, like)
        made = {
            "init": tx.init(params),
            "jit": jax.jit(tx.init)(params),
            "pinned": jax.jit(tx.init, out_shardings=there)(params),
        }
        assert described(jax.eval_shape(tx.init, params)) == expected
    assert described(like) == expected
    by_matrix = NamedSharding(training.mesh, P(("x", "y")))
    for way, state in made.items():
        assert described(state) == expected
        left = optax.tree.get(state, "leaves")["w"][2][0]
        assert left.sharding.is_equivalent_to(by_matrix, left.ndim), way


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inside", "around"])
def test_master_weights_in_bfloat16(name):
    """Parameters have 16 bits, and all of the state 32."""
    use = f"master_weights {name}"
    training = Training(use, "soap", dtype=jnp.bfloat16)
    params, state = training.actual(training.state())
    actual = gx.get_master_weights(params, state), state.inner_state
    params, state = training.expected()
    close(actual, (gx.get_master_weights(params, state), state.inner_state), 3e-4)


def loss(params):
    """Its gradients are exact on a mesh, too: no sum over parameters is in them."""
    return sum(jnp.sum(jnp.cos(3 * x)) for x in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize("axes", TYPES)
def test_minimize(axes):
    """Loss, gradients and update in one program."""
    training = Training("chain around", "soap", TYPES[axes])

    def run(tx, params, state):
        step = gx.minimize(lambda params, _: loss(params), tx)
        for _ in range(STEPS):
            params, state, _ = step(params, state, 0.0)
        return jax.device_get((params, state))

    expected = run(training.inner, training.plain, training.inner.init(training.plain))
    with jax.set_mesh(training.mesh):
        actual = run(training.tx, training.params, training.state())
    close(actual, expected, 3e-4)


class Net(nnx.Module):
    """Parameters of a model."""

    def __init__(self, params):
        self.w, self.v, self.b = (
            nnx.Param(jnp.asarray(params[name])) for name in "wvb"
        )


def of_list(tx):
    """A transformation of a list: nnx takes no state with tuples for parameters."""

    def update(updates, state, params):
        flat, treedef = jax.tree.flatten(updates)
        flat, state = tx.update(flat, state, jax.tree.leaves(params))
        return treedef.unflatten(flat), state

    return optax.GradientTransformation(lambda p: tx.init(jax.tree.leaves(p)), update)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nnx_optimizer(optimizer):
    """With the shardings of its own parameters, as they are in their boxes."""
    training = Training("chain around", optimizer)

    @nnx.jit
    def step(net, state):
        grads = nnx.grad(lambda net: loss([net.w[...], net.v[...], net.b[...]]))(net)
        state.update(net, grads)

    def run(whole, params):
        net = Net(params)
        where = jax.tree.map(lambda p: p.sharding, nnx.state(net, nnx.Param))
        tx = USES["chain around"](whole, of_list(OPTIMIZERS[optimizer]()), where)
        state = nnx.Optimizer(net, tx, wrt=nnx.Param)
        for _ in range(STEPS):
            step(net, state)
        return jax.device_get(nnx.to_pure_dict(nnx.state(net, nnx.Param)))

    actual = run(gx.whole_matrices, training.params)
    expected = run(lambda tx, _: tx, training.plain)
    close(actual, expected, TOLERANCE[optimizer])


LEAVES = dict.fromkeys("acde", (16, 24))


# Shapes, how they are cut, and the exchanges: of leaves one is in the conditional.
OF_PACKAGES = {
    "leaves": (LEAVES, dict.fromkeys(LEAVES, P("x", "y")), 3),
    "a stack": ({"w": (8, 16, 24)}, {"w": P(None, "x", "y")}, 2),
    "stacks": (
        {"w": (8, 16, 24), "v": (8, 24, 16)},
        {"w": P(None, "x", "y"), "v": P(None, "y", "x")},
        4,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("axes", TYPES)
@pytest.mark.parametrize("layout", OF_PACKAGES)
def test_a_conditional_for_all_as_packages_have_it(layout, axes):
    """Equal leaves have equal programs in it. A probe of a stack mixes no layers."""
    shapes, specs, exchanges = OF_PACKAGES[layout]
    on = mesh((4, 2), TYPES[axes])
    where = places(specs, on)
    said = where if axes == "automatic" else None
    tx, ours = fitted_at_once(), gx.whole_matrices(fitted_at_once(), said)
    plain = jax.device_get(draw(shapes))
    with jax.set_mesh(on):
        params = jax.device_put(plain, where)
        state, expected = placed_state(ours, params, tx.init(plain)), tx.init(plain)
        here = jax.tree.map(lambda x: x.sharding, (params, state))
        update = jax.jit(ours.update, out_shardings=here)
        kinds, moved = collectives(update.lower(params, state, params).compile())
        assert kinds["all-to-all"] == exchanges
        if layout != "leaves":
            size = sum(x.size for x in jax.tree.leaves(params))
            assert moved <= (2 / 8 + 0.01) * size
        alone = jax.jit(tx.update)
        for seed in range(1, 5):
            grads = draw(shapes, seed)
            made, state = update(jax.device_put(grads, where), state, params)
            wanted, expected = alone(grads, expected, plain)
            close(jax.device_get((made, state)), (wanted, expected), 1e-5)


def test_a_number_may_be_an_operand_of_a_conditional():
    """A literal of the program has no name; the factor beside it is found."""

    def fitted(index, q):
        cases = (lambda a, q: q, lambda a, q: a * q)
        return jax.lax.switch(index, cases, 0.9, q)

    jaxpr = jax.make_jaxpr(fitted)(0, jnp.eye(8)).jaxpr
    eqn = jaxpr.eqns[-1]
    assert any(not jaxprs.is_variable(x) for x in eqn.invars)
    q = jaxpr.invars[1]
    found = due.kept(eqn.outvars[0], [eqn], {eqn.invars[0]: "index"}, {q})
    assert found.operand is q


def mixed(updates, _):
    """A conditional whose branch multiplies one leaf by another one."""
    a, c = updates["a"], updates["c"]
    a, c = jax.lax.cond(
        jnp.sum(a) > 0, lambda a, c: (a @ c.T @ a, c), lambda a, c: (a, c), a, c
    )
    return updates | {"a": a, "c": c @ c.T @ c}


def test_a_refused_conditional_is_named_by_its_own_line():
    where = places(dict.fromkeys(LEAVES, P("x", "y")), mesh((4, 2)))
    tx = gx.whole_matrices(optax.stateless(mixed), where)
    params = jax.device_put(draw(LEAVES), where)
    with pytest.raises(TypeError, match=r"'cond' \S*test_matrices_in_use\.py:\d+"):
        jax.jit(tx.update)(params, tx.init(params), params)


@pytest.mark.slow
def test_factors_of_leaves_by_rows_of_all_devices():
    """Types say where they are: they have no copies, and travel once each way."""
    names = [f"w{n}" for n in range(8)]
    on = mesh((4, 2), AxisType.Explicit)
    where = places(dict.fromkeys(names, P("x", "y")), on)
    plain = jax.device_get(draw(dict.fromkeys(names, (16, 24))))
    inner, tx = soap(), gx.whole_matrices(soap())
    rows = NamedSharding(on, P(("x", "y"), None))

    def by_rows(x):
        is_factor = x.ndim == 2 and x.shape[0] == x.shape[1]
        return rows if is_factor else x.sharding

    with jax.set_mesh(on):
        params = jax.device_put(plain, where)
        there = jax.tree.map(by_rows, gx.abstract_state(tx, params))
        state = jax.device_put(inner.init(plain), there)
        step = jax.jit(step_of(tx), out_shardings=(where, there))
        kinds, moved = collectives(step.lower(params, state, params).compile())
        assert kinds.keys() == {"all-to-all"}
        size, of_state = (
            sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, state)
        )
        # All branches of conditionals count: it is less in each step.
        assert moved <= 2.2 * (size + of_state) / 8
        alone = jax.jit(step_of(inner))
        now, expected = (params, state), (plain, inner.init(plain))
        for seed in range(1, 5):
            grads = draw(dict.fromkeys(names, (16, 24)), seed)
            now = step(*now, jax.device_put(grads, where))
            expected = alone(*expected, grads)
    close(jax.device_get(now), expected, 3e-4)


# The number of devices along each axis of the mesh on which two steps run.
STAYS = [(8, 1), (4, 2), (1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_goes_on_elsewhere(optimizer, tmp_path):
    """From 8 devices to 4 x 2 and to one, with the state by matrix.

    On one device the optimizer goes on without ``whole_matrices``.
    """
    training = Training("alone", optimizer)
    tx = training.inner
    now, pushes = (training.plain, tx.init(training.plain)), iter(training.pushes)
    for n, sizes in enumerate(STAYS):
        where = places(SPECS, mesh(sizes))
        like = jax.tree.map(
            lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
            *(training.plain, where),
        )
        ours = tx if sizes == (1, 1) else gx.whole_matrices(tx, where)
        target = like, gx.abstract_state(ours, like)
        there = jax.tree.map(lambda x: x.sharding, target)
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / str(n), now)
            saver.wait_until_finished()
            now = saver.restore(tmp_path / str(n), target)
        if sizes != (1, 1):
            left = now[1].leaves["w"][2 if optimizer == "soap" else 1][0]
            assert left.addressable_shards[0].data.shape[0] == 1
        step = functools.partial(training.push, ours)
        step = jax.jit(step, donate_argnums=(0, 1), out_shardings=there)
        for _ in range(2):
            now = step(*now, jax.device_put(next(pushes), where))
    close(jax.device_get(now), training.expected(), TOLERANCE[optimizer])
