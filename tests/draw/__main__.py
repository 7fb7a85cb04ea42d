"""Hunts for a program whose slices are not those of the whole.

``python -m tests.draw --minutes 30 --seed 1`` draws programs of all families by turns.
It prints the first one that is wrong, and the shortest one that hypothesis finds in its
family.
"""

import argparse
import time

import hypothesis

from tests.draw import programs
from tests.draw.programs import FAMILIES


def is_right(p):
    try:
        programs.check(p)
    except (
        AssertionError,
        IndexError,
        TypeError,
        ValueError,
    ):  # JAX has more than one.
        return False
    return True


def shortest(how):
    """The shortest wrong program that a new search finds; None if it finds none."""
    quiet = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(
        max_examples=2000, deadline=None, suppress_health_check=quiet
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
    end, count = time.monotonic() + 60 * options.minutes, 0
    while time.monotonic() < end:
        for name, stream in streams.items():
            p = next(stream)
            count += 1
            if not is_right(p):
                print(f"program {count}, of {name!r}:{p!r}", flush=True)
                print(f"\nthe shortest one found:{shortest(FAMILIES[name])!r}")
                raise SystemExit(1)
    print(f"{count} programs, none is wrong")


if __name__ == "__main__":
    main()
