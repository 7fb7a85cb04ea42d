"""Draws schedules of configs, as long as trainings are, beside their formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from tests.draw.operations import Draw

LENGTHS = 7, 100, 4_096, 4_097, 10_000, 65_537, 100_000, 1_000_000
PUSHES = 1, 3, 64, 4_096


def inverse_time(step, length, decay_rate, staircase=False):
    periods = step // length if staircase else step / length
    return 1 / (1 + decay_rate * periods)


def polynomial(step, length, end_value, power, cycle=False):
    whole = length * max(1, -(-step // length)) if cycle else length
    return (1 - end_value) * max(0, 1 - step / whole) ** power + end_value


def restarts(step, length, t_mul=2.0, m_mul=1.0, alpha=0.0):
    height = 1.0
    while step >= length:
        step, length, height = step - length, length * t_mul, height * m_mul
    return (1 - alpha) * height * (1 + np.cos(np.pi * step / length)) / 2 + alpha


def linear_cosine(step, length, num_periods=0.5, alpha=0.0, beta=0.001):
    past = min(step / length, 1)
    cosine = (1 + np.cos(2 * np.pi * num_periods * past)) / 2
    return (alpha + 1 - past) * cosine + beta


# By their names in configs: the formula, the argument that is a length, and the others.
SCHEDULES = {
    "inverse_time_decay": (
        *(inverse_time, "transition_steps"),
        {"decay_rate": (0.5, 3.0), "staircase": (False, True)},
    ),
    "polynomial_decay": (
        *(polynomial, "transition_steps"),
        {"end_value": (0.0, 0.25), "power": (0.5, 1.0, 2.0), "cycle": (False, True)},
    ),
    "cosine_decay_restarts": (
        *(restarts, "first_decay_steps"),
        {"t_mul": (1.0, 1.5, 2.0), "m_mul": (1.0, 0.5), "alpha": (0.0, 0.25)},
    ),
    "linear_cosine_decay": (
        *(linear_cosine, "decay_steps"),
        {"num_periods": (0.5, 1.5), "alpha": (0.0, 0.1), "beta": (0.0, 0.1)},
    ),
}


@dataclasses.dataclass
class Schedule:
    """A schedule by its name, with its numbers, and pushes a step."""

    name: str
    length: int
    numbers: dict[str, float]
    pushes: int

    def check(self):
        """Raises if it is not its formula, from the first step to the last of all."""
        formula, of_length, _ = SCHEDULES[self.name]
        config = {"name": self.name, "init_value": 1.0, of_length: self.length}
        config |= self.numbers
        if self.pushes > 1:
            config = {
                "name": "at_last_push",
                "schedule": config,
                "num_required": self.pushes,
            }
        tx = gx.from_config({"name": "scale_by_learning_rate", "learning_rate": config})
        # Near the ends of periods, and between them, as far as float32 counts.
        parts = (0, 0.3, 1, 1.5, 2, 2.7, 3, 7)
        near = {
            int(n * self.length) // self.pushes + k for n in parts for k in (-1, 0, 1)
        }
        steps = sorted(k for k in near if k >= 0 and self.pushes * (k + 1) < 2**24)

        @jax.jit
        @jax.vmap
        def rates(step):
            state = optax.ScaleByScheduleState(step)
            return -tx.update(jnp.ones(()), state)[0]

        got = rates(np.array(steps, np.int32))
        counts = [self.pushes * (k + 1) - 1 for k in steps]
        wanted = [formula(k, self.length, **self.numbers) for k in counts]
        where = f"{self} at {steps}"
        # A root near the end of a period is as exact as the root of a rounding.
        atol = 1e-3 if self.numbers.get("power") == 0.5 else 3e-6
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=atol, err_msg=where)


class Schedules:
    """Draws them."""

    def drawn(self, integer):
        d = Draw(integer)
        name = d.one_of(SCHEDULES)
        _, _, choices = SCHEDULES[name]
        numbers = {k: d.one_of(values) for k, values in choices.items()}
        return Schedule(name, d.one_of(LENGTHS), numbers, d.one_of(PUSHES))


FAMILIES = {"schedules": Schedules()}
