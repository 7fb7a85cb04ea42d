"""A row's fields reach the tests, and a test that fails names the field."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._gates import gate
from tests import oracles, test_contract
from tests.descriptors import ADAGRAD, RANGES, D


class SkipAboveMedianState(NamedTuple):
    global_step: jax.Array
    losses: jax.Array
    inner_state: optax.OptState


def skip_above_median(
    inner: optax.GradientTransformation, factor: jax.typing.ArrayLike = 2.0
) -> optax.GradientTransformationExtraArgs:
    """A gate that judges by the loss alone, and needs one."""

    def init(params):
        return SkipAboveMedianState(
            jnp.int32(0), jnp.full(3, jnp.inf, jnp.float32), inner.init(params)
        )

    def decide(updates, state, *, value, **extra):
        usual = value <= factor * jnp.median(state.losses)
        losses = jnp.append(state.losses[1:], jnp.float32(value))
        state = state._replace(losses=losses)
        return gate.Decision(usual, usual, lambda _: updates, state, extra)

    return gate.gate(init, inner, decide)


def scale_by_sign(
    decay: jax.typing.ArrayLike = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Signs of a momentum, as Lion has them."""

    def update(updates, state, params=None, **extra):
        mu = jax.tree.map(lambda m, g: decay * m + g, state, updates)
        return jax.tree.map(jnp.sign, mu), mu

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformationExtraArgs(init, update)


def sign(params, sequence, learning_rate, decay=0.5):
    mu = {k: np.zeros_like(p) for k, p in params.items()}
    for grads in sequence:
        mu = {k: decay * mu[k] + g for k, g in grads.items()}
        params = {k: params[k] - learning_rate * np.sign(m) for k, m in mu.items()}
        yield (params,)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """As somebody adds a transformation; the gate's formula is that all pushes act."""
    monkeypatch.setattr(gx, "skip_above_median", skip_above_median, raising=False)
    monkeypatch.setattr(gx, "scale_by_sign", scale_by_sign, raising=False)
    monkeypatch.setitem(
        oracles.ACTING, "skip_above_median", lambda pushes, *_, **__: pushes
    )
    monkeypatch.setattr(oracles, "sign", sign, raising=False)


GATE = D("skip_above_median", inner=ADAGRAD, value=2.0)
SIGN = D("scale_by_sign", piecewise_constant=True)


def test_a_gate_may_judge_by_the_loss():
    test_contract.assert_formula(GATE, GATE.make().update)
    test_contract.test_types_are_stable(GATE, "float16")
    row = D("skip_above_median", inner=ADAGRAD)
    with pytest.raises(TypeError, match="value"):
        test_contract.test_types_are_stable(row, "float16")


def test_an_update_may_be_piecewise_constant():
    test_contract.assert_formula(SIGN, SIGN.make().update)
    test_contract.test_derivatives_through_the_update_are_finite(SIGN)


def says(field, value):
    return rf"tests/descriptors\.py says .*{field}={value}"


@pytest.mark.every
@pytest.mark.parametrize(
    ("test", "row", "field", "value"),
    [
        (
            "derivatives_through_the_update_are_finite",
            D("scale_by_sign"),
            "piecewise_constant",
            False,
        ),
        (
            "derivatives_through_the_update_are_finite",
            D("adagrad", learning_rate=0.1, piecewise_constant=True),
            "piecewise_constant",
            True,
        ),
        (
            "only_a_row_that_reads_params_needs_them",
            D("compensate_delay", worker_params=True),
            "reads_params",
            False,
        ),
        (
            "only_a_row_that_reads_params_needs_them",
            D("adagrad", learning_rate=0.1, reads_params=True),
            "reads_params",
            True,
        ),
    ],
)
def test_a_contract_names_the_field_that_is_wrong(test, row, field, value):
    with pytest.raises(AssertionError, match=says(field, value)):
        getattr(test_contract, f"test_{test}")(row)


def test_a_contract_names_the_field_of_types():
    row = D("ftrl", learning_rate=0.1, reads_params=True, sets_params=True)
    grads = D("round_stochastically", seed=0, reads_params=True)
    test_contract.test_types_are_stable(row, "float16")
    with pytest.raises(AssertionError, match=says("wide_updates", False)):
        test_contract.test_types_are_stable(grads, "float16")


def test_a_contract_names_the_part_of_the_formula_that_is_wrong():
    row = D("adagrad", learning_rate=0.1)
    other = D("adagrad", learning_rate=0.2)
    with pytest.raises(AssertionError, match="all updates of leaf w, after push 1"):
        test_contract.assert_formula(row, other.make().update)


def test_an_error_for_complex_gradients_names_the_field():
    def fail():
        with test_contract.for_complex(SIGN, "complex64"):
            raise ValueError("complex numbers have no order")

    with pytest.raises(ValueError, match="no order") as info:
        fail()
    assert "says real_only=False" in info.value.__notes__[0]


def test_a_wrong_range_is_found(monkeypatch):
    """As "[0, 1]" in the code, where the docstring has "[0, 1)"."""
    row = D("scale_by_novograd")
    for wrong in ("[0, 1]", "(0, 1)", "[0, 2)", "[-1, 1)"):
        monkeypatch.setitem(RANGES, "b1", wrong)
        with pytest.raises(AssertionError, match=r"range .*b1="):
            test_contract.test_numbers_at_below_and_above_both_ends_of_their_ranges(row)
    monkeypatch.undo()
    test_contract.test_numbers_at_below_and_above_both_ends_of_their_ranges(row)
