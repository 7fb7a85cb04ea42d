"""Tables of the pages on porting that are compared with more than one step.

``test_migration.py`` has all tables whose rows give one value. The code of these rows is
read from the pages, too. The expected values are those that TensorFlow 1.15.5 left in
``golden``, or come from the formula of the original in float64 NumPy.
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

HERE = pathlib.Path(__file__).parent
PAGES = HERE.parent / "docs/coming_from"


def cases(name):
    return json.loads((HERE / f"golden/{name}.json").read_text())["cases"]


def table(page, first_cell):
    """The first two cells of each row of the table that begins with this cell."""
    (found,) = re.findall(
        rf"^\| {first_cell} \|.*\n\|---.*\n((?:\|.*\n)*)", (PAGES / page).read_text(), re.M
    )
    cells = re.findall(r"^\| (.+?) \| (.*?) ?\| .*?\|$", found, re.M)
    return [(there, here.strip("`")) for there, here in cells]


# The schedules of TensorFlow 1

SCHEDULES = {there.strip("`"): here for there, here in table("tensorflow.md", "schedule")}
RATES = cases("tf1_schedules")


def restarted(step, steps):
    n = int(np.log2(step // steps + 1))
    part = (step - steps * (2**n - 1)) / (steps * 2**n)
    return 0.1 * 0.5**n * (1 + np.cos(np.pi * part)) / 2


def linear_cosine(part):
    return 0.1 * ((1 - part) * (1 + np.cos(np.pi * part)) / 2 + 0.001)


# By the name and the option of each call, its formula. k is the step, n the steps.
FORMULAS = {
    "exponential_decay": lambda k, n: 0.1 * 0.5 ** (k / n),
    "exponential_decay staircase": lambda k, n: 0.1 * 0.5 ** (k // n),
    "piecewise_constant": lambda k, n: (0.1, 0.05, 0.01)[(k > n) + (k > 2 * n)],
    "polynomial_decay": lambda k, n: 0.01 + 0.09 * (1 - min(k, n) / n) ** 2,
    "polynomial_decay root": lambda k, n: 0.1 * (1 - min(k, n) / n) ** 0.5,
    "polynomial_decay cycle": lambda k, n: (
        0.01 + 0.09 * (1 - k / (n * max(1, -(-k // n)))) ** 2
    ),
    "natural_exp_decay": lambda k, n: 0.1 * np.exp(-0.5 * k / n),
    "natural_exp_decay staircase": lambda k, n: 0.1 * np.exp(-0.5 * (k // n)),
    "inverse_time_decay": lambda k, n: 0.1 / (1 + 0.5 * k / n),
    "inverse_time_decay staircase": lambda k, n: 0.1 / (1 + 0.5 * (k // n)),
    "cosine_decay": lambda k, n: (
        0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * min(k, n) / n)) / 2)
    ),
    "cosine_decay_restarts": restarted,
    "linear_cosine_decay": lambda k, n: linear_cosine(min(k, n) / n),
}
# Where TensorFlow multiplies by a rounded 1 / steps, and so is on the wrong side of a
# boundary: a staircase takes its step late, and a cycle begins early.
ROUNDED = {("staircase", 41): {41, 82, 164, 287}, ("cycle", 1000): {3000, 6000, 7000}}


def option(case):
    found = re.search(r"(\w+)=True|power=0.5", case["call"])
    return found[1] or "root" if found else ""


def formula(case):
    name = case["symbol"].removeprefix("tf.train.")
    rate = FORMULAS[f"{name} {option(case)}".strip()]
    return [rate(count, case["decay_steps"]) for count in case["counts"]]


def test_every_schedule_of_tensorflow_has_a_row():
    assert {case["call"] for case in RATES} == {k for k, v in SCHEDULES.items() if v}
    named = {re.match(r"tf.train.(\w+)", call)[1] for call in SCHEDULES}
    assert named == {
        *("exponential_decay", "piecewise_constant", "polynomial_decay"),
        *("natural_exp_decay", "inverse_time_decay", "cosine_decay"),
        *("cosine_decay_restarts", "linear_cosine_decay", "noisy_linear_cosine_decay"),
    }


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", RATES, ids=lambda case: case["name"])
def test_a_row_has_the_rates_of_tensorflow(case):
    names = {"jnp": jnp, "optax": optax, "steps": case["decay_steps"]}
    schedule = eval(SCHEDULES[case["call"]], names)
    for called in (schedule, jax.jit(schedule)):
        rates = np.float64([called(jnp.int32(count)) for count in case["counts"]])
        np.testing.assert_allclose(rates, formula(case), rtol=2e-5, atol=2e-8)
    # The root of 1 - 1, rounded, is up to 2.5e-4 there.
    atol = 3e-5 if option(case) == "root" else 2e-8
    same = np.isclose(rates, case["rates"], rtol=2e-5, atol=atol)
    others = {count for count, s in zip(case["counts"], same, strict=True) if not s}
    assert others == ROUNDED.get((option(case), case["decay_steps"]), set())


@pytest.mark.usefixtures("standard_promotion")
def test_an_optimizer_counts_as_the_global_step_of_tensorflow():
    """The first update has the rate of step 0."""
    (case,) = [c for c in RATES if "piecewise" in c["name"] and c["decay_steps"] == 6]
    schedule = eval(SCHEDULES[case["call"]], {"optax": optax, "steps": 6})
    tx = gx.drop_stale(gx.scale_by_learning_rate(schedule), max_staleness=0)
    state, taken = tx.init(jnp.zeros(())), []
    for step in range(14):
        if step:  # A late gradient is dropped, and does not count.
            dropped, state = tx.update(jnp.ones(()), state, local_step=step - 1)
            assert dropped == 0
        update, state = tx.update(jnp.ones(()), state, local_step=step)
        taken.append(-float(update))
    expected = dict(zip(case["counts"], case["rates"], strict=True))
    for step in expected.keys() & {*range(14)}:
        assert abs(taken[step] - expected[step]) < 1e-8
