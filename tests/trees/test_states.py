"""A state is that of a gate if its class says so, whatever its fields are."""

import pickle
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import gradxform as gx
from gradxform._gates.gate import gate_of
from gradxform._trees import states
from tests.descriptors import DESCRIPTORS

PARAMS = {"w": jnp.ones(2)}


class Own(NamedTuple):
    """A user's state, with the fields of every gate."""

    global_step: Any
    stale_count: Any
    num_accumulated: Any
    ring: Any
    inner_state: Any


def own(inner, deaf=False):
    """A user's wrapper. Its numbers are of another kind than those of a gate."""
    inner = optax.with_extra_args_support(inner)

    def init(params):
        many = jnp.full(3, 7.5)
        return Own(many, many, many, many, inner.init(params))

    def update(updates, state, params=None, **extra):
        updates, new = inner.update(updates, state.inner_state, params, **extra)
        return updates, state._replace(global_step=-state.ring, inner_state=new)

    if deaf:
        return optax.GradientTransformation(init, lambda g, s, p=None: update(g, s, p))
    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize(
    "tx",
    [
        own(optax.sgd(1.0)),
        own(gx.drop_stale(optax.sgd(1.0), 0)),
        gx.drop_stale(own(optax.sgd(1.0)), 0),
        optax.chain(own(optax.identity()), gx.drop_stale(optax.sgd(1.0), 0)),
    ],
    ids=["alone", "around", "inside", "beside"],
)
def test_a_server_takes_a_users_state_for_no_gate(tx):
    server = gx.ParameterServer(PARAMS, tx)
    answers = [server.push(PARAMS, 0) for _ in range(2)]
    assert answers[0].global_step == 1
    params, step = server.pull()
    applied = sum(answer.applied for answer in answers)
    assert step == applied == server.stats().accepted
    np.testing.assert_array_equal(params["w"], np.full(2, 1.0 - applied))


@pytest.mark.slow
def test_global_step_and_fraction_are_those_of_gates():
    gate = gx.drop_stale(optax.sgd(1.0), 0)
    for tx in (own(gate), gx.drop_stale(own(gate), 0), optax.chain(own(own(gate)))):
        state = tx.init(PARAMS)
        for local_step in (0, 0, 0):
            _, state = tx.update(PARAMS, state, PARAMS, local_step=local_step)
        assert gx.global_step(state) == 1
        assert gx.staleness_fraction(state) == 1.0
    beside = optax.chain(own(optax.identity()), gate).init(PARAMS)
    assert gx.global_step(beside) == 0
    alone = own(optax.sgd(1.0)).init(PARAMS)
    for read in (gx.global_step, gx.staleness_fraction):
        with pytest.raises(ValueError, match="the state holds no"):
            read(alone)


@pytest.mark.slow
def test_an_argument_is_not_needed_by_a_users_state():
    """Optax drops arguments that a wrapper does not take, and so does an update."""
    tx = gx.skip_spikes(own(optax.sgd(1.0), deaf=True))
    extra = {"weight": 1.0, "last": True, "local_step": 0}
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra)
    np.testing.assert_array_equal(updates["w"], -np.ones(2))


def test_only_gates_have_rules_of_their_own_for_a_missing_gradient():
    """Others are shown no such leaf, as this one could not add None to a parameter."""
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = own(optax.stateless(lambda g, p: jax.tree.map(jnp.add, g, p)))
    grads = {"a": jnp.ones(2), "b": None}
    new, _ = gx.apply_gradients(tx, grads, tx.init(params), params)
    np.testing.assert_array_equal(new["a"], np.full(2, 3.0))
    np.testing.assert_array_equal(new["b"], params["b"])


@pytest.mark.every
@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_the_states_of_gates_are_marked_and_no_others(row):
    tx = row.make()
    marked = states.mark_of(type(jax.eval_shape(tx.init, PARAMS))).gate
    assert marked == (gate_of(tx) is not None)


@pytest.mark.slow
def test_a_mark_stays_with_its_class(tmp_path):
    tx = gx.drop_stale(gx.delayed(optax.sgd(1.0), 1), 0)
    state = tx.init(PARAMS)
    optimizer = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    path = tmp_path / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    copies = {
        "tree": jax.tree.map(jnp.zeros_like, state),
        "pickle": pickle.loads(pickle.dumps(state)),
        "jit": jax.jit(lambda s: s)(state),
        "described": jax.eval_shape(lambda s: s, state),
        "nnx": nnx.merge(*nnx.split(optimizer)).opt_state,
        "orbax": ocp.StandardCheckpointer().restore(path, state),
    }
    for name, copy in copies.items():
        assert [path for path, _ in states.gates(copy)] == [()], name
        assert states.has_gate(copy.inner_state, "ring"), name


def test_the_installed_optax_has_each_state_that_is_known_of_it():
    """By the name of its class, and of each field."""
    modules = [m for name, m in sys.modules.items() if name.startswith("optax")]
    for name, mark in states.OF_OPTAX.items():
        found = {vars(m)[name] for m in modules if name in vars(m)}
        if not found:
            assert name == "MadgradState"  # Optax 0.2.6 has none.
            continue
        (kind,) = found
        assert states.mark_of(kind) is mark
        assert {*mark.kept, *mark.hints} <= {*kind._fields}


def test_the_installed_optax_reads_what_is_known_of_it():
    """A line search needs these words, and says so without them."""
    for search in (
        optax.scale_by_zoom_linesearch(3),
        optax.scale_by_backtracking_linesearch(3),
    ):
        state = search.init(PARAMS)
        words = states.words((state,))
        assert words == {"value", "grad", "value_fn"}
        for word in words:
            others = dict.fromkeys(words - {word}, 0.0)
            with pytest.raises(TypeError, match=f"missing.*'{word}'"):
                search.update(PARAMS, state, PARAMS, **others)


def test_nothing_is_known_of_a_users_class_with_a_name_of_optax():
    kind = type("MuonState", (Own,), {})
    assert states.mark_of(kind) == states.Mark()
