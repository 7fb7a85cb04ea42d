"""Hunts for a program that two ways to run it do not agree on.

``python -m tests.draw --minutes 30 --seed 1`` draws by turns: programs for the slices
of their arguments, updates by layers and by the row, steps, and how they are called;
states, schedules, optimizers of matrices, and losses with a ``jit`` inside. It prints
the first one that is wrong, and the shortest one that hypothesis finds in its family.
"""

import argparse
import itertools
import os
import time

import hypothesis
import jax

from tests.draw import calls, inits, jits, matrices, programs, schedules, steps, updates

FAMILIES = programs.FAMILIES | updates.FAMILIES | steps.FAMILIES | calls.FAMILIES
FAMILIES |= inits.FAMILIES | jits.FAMILIES | matrices.FAMILIES | schedules.FAMILIES


def is_right(p):
    try:
        p.check()
    except (
        AssertionError,
        IndexError,
        TypeError,
        ValueError,
    ) as error:  # JAX has more than one.
        print(f"{type(error).__name__}: {str(error)[:2000]}")
        return False
    return True


def shortest(how):
    """The shortest wrong program that a new search finds; None if it finds none."""
    examples = 100 if how in steps.FAMILIES.values() else 2000
    quiet = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, suppress_health_check=quiet
    )
    try:
        wrong = hypothesis.find(
            programs.programs(how), lambda p: not is_right(p), settings=settings
        )
    except hypothesis.errors.NoSuchExample:
        return None
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    streams = {
        name: programs.random_programs(how, options.seed)
        for name, how in FAMILIES.items()
    }
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax.config.update("jax_num_cpu_devices", 8)
    end, count = time.monotonic() + 60 * options.minutes, 0
    for name, stream in itertools.cycle(streams.items()):
        if time.monotonic() > end:
            break
        p = next(stream)
        count += 1
        if not is_right(p):
            print(f"program {count}, of {name!r}:{p!r}", flush=True)
            print(f"\nthe shortest one found:{shortest(FAMILIES[name])!r}")
            raise SystemExit(1)
        if count % 100 == 0:
            jax.clear_caches()
    print(f"{count} programs, none is wrong")


if __name__ == "__main__":
    main()
