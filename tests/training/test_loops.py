"""Some results of a loop: drawn loops of sums, compared with a loop of NumPy."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax

from gradxform._jax import jaxprs
from gradxform._matrices.loops import Loop
from tests.in_numpy import Program

TURNS = 4
BODIES = {"scan": "jaxpr", "while": "body_jaxpr"}


class Sums:
    """A loop of numbers: each is the sum of a constant and of some of those before it.

    Attributes:
      wanted: the positions of results: of those that go on, then of stacked ones.
      args: a limit, a number, constants, the first numbers, arrays to go over.
    """

    def __init__(self, seed, is_scan):
        rng = np.random.default_rng(seed)
        self.count, num_consts, num_over, num_stacked = rng.integers(
            (1, 0, 0, 0), (5, 4, 3, 3)
        )
        if not is_scan:
            num_over = num_stacked = 0
        self.is_scan, self.reverse = is_scan, bool(rng.random() < 0.5)
        rows = self.count + num_stacked
        # Which numbers of the carry, constants and arrays each result reads.
        self.reads = [
            rng.random((rows, n)) < 0.4 for n in (self.count, num_consts, num_over)
        ]
        self.decides = rng.random(self.count) < 0.3
        self.is_literal = rng.random(self.count) < 0.3
        self.wanted = [k for k in range(rows) if rng.random() < 0.4] or [0]
        self.args = [
            *(np.float32(TURNS), np.float32(1)),
            [np.float32(n) for n in rng.integers(1, 4, num_consts)],
            [np.float32(n) for n in rng.integers(1, 4, self.count)],
            [*rng.integers(1, 4, (num_over, TURNS)).astype(np.float32)],
        ]

    def turn(self, consts, now, over):
        """The numbers that go on, and those that are stacked."""
        made = []
        for row, reads in enumerate(zip(*self.reads, strict=True)):
            pairs = zip((now, consts, over), reads, strict=True)
            read = itertools.chain(*(itertools.compress(*pair) for pair in pairs))
            made.append(sum(read, start=np.float32(row)))
        return made[: self.count], made[self.count :]

    def traced(self, limit, number, consts, start, over):
        """By JAX. A loop with a predicate has a counter, which is its first result."""
        pairs = zip(start, self.is_literal, strict=True)
        start = [np.float32(2) if is_literal else x for x, is_literal in pairs]
        if self.is_scan:
            last, ys = lax.scan(
                lambda now, x: self.turn(consts, now, x),
                *(start, over, TURNS),
                reverse=self.reverse,
            )
            return [*last, *ys]

        def goes_on(state):
            count, now = state
            nothing = 0 * sum(itertools.compress(now, self.decides), start=number)
            return count + nothing < limit

        def turn(state):
            return state[0] + 1, self.turn(consts, state[1], [])[0]

        count, last = lax.while_loop(goes_on, turn, (np.float32(0), start))
        return [count, *last]

    def expected(self):
        """By NumPy."""
        _, _, consts, start, over = self.args
        now = np.where(self.is_literal, 2, start)
        found = np.zeros((len(self.reads[0]) - self.count, TURNS))
        for n in range(TURNS)[:: -1 if self.reverse else 1]:
            now, found[:, n] = self.turn(consts, now, [x[n] for x in over])
        return [*now, *found]

    def needed(self):
        """The positions of arguments that the wanted results need."""
        rows = {*self.wanted}
        if not self.is_scan:
            rows.update(np.flatnonzero(self.decides))
        for _ in range(self.count):
            rows.update(
                k for row in [*rows] for k in np.flatnonzero(self.reads[0][row])
            )
        carry = {k for k in rows if k < self.count and not self.is_literal[k]}
        consts, over = ({*np.flatnonzero(x[[*rows]].any(0))} for x in self.reads[1:])
        found, start = {*range(0 if self.is_scan else 2)}, 2
        for some, of in zip((consts, carry, over), self.args[2:], strict=True):
            found.update(start + k for k in some)
            start += len(of)
        return found

    def divided(self):
        """A program of the wanted results, and the arguments that it says it reads."""
        closed, read = jax.make_jaxpr(self.traced)(*self.args), set()
        results = closed.jaxpr.outvars if self.is_scan else closed.jaxpr.outvars[1:]
        wanted = [results[k] for k in self.wanted]

        def rule(name, inputs, eqn):
            if name not in BODIES:
                return None
            loop = Loop(eqn, inputs, eqn.params[BODIES[name]])
            positions = [eqn.outvars.index(x) for x in wanted]
            read.update(map(closed.jaxpr.invars.index, loop.operands(positions)))
            made = dict(zip(wanted, loop.results(positions), strict=True))
            return [made.get(x, 0.0) for x in eqn.outvars]

        def run(*args):
            found = jaxprs.run(closed.jaxpr, args, rule)[0 if self.is_scan else 1 :]
            return [found[k] for k in self.wanted]

        return jax.make_jaxpr(run)(*jax.tree.leaves(self.args)), read


@pytest.mark.every
@pytest.mark.parametrize("is_scan", [True, False])
def test_some_results_of_a_loop_need_no_others(is_scan):
    for seed in range(25):
        sums = Sums(seed, is_scan)
        program, read = sums.divided()
        results, expected = Program(program)(*sums.args), sums.expected()
        np.testing.assert_equal(results, [expected[k] for k in sums.wanted])
        assert read == sums.needed(), seed
        (loop,) = (x for x in program.eqns if x.primitive.name in BODIES)
        operands = [*jaxprs.among(loop.invars, program.jaxpr.invars).values()]
        assert {*map(program.jaxpr.invars.index, operands)} == read, seed
