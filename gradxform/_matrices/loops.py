"""Divides loops of several parameters: each parameter gets a loop of its own.

An optimizer may iterate over a whole tree at once, such as Newton's iteration for all
inverse roots. If the carry of one parameter depends on no other one, each loop has what
its results need: its part of the carry, and the counter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax

from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Var


class Loop:
    """A scan, or a loop with a predicate: it computes some of its results."""

    def __init__(self, eqn: JaxprEqn, inputs: Sequence[Any], body: ClosedJaxpr) -> None:
        """``body`` is what the equation repeats, or a program with the same results."""
        self._eqn, self._body, self._ends = eqn, body, None
        self._before = 0  # Operands of the predicate, which are the first ones.
        if jaxprs.name_of(eqn) == Op.SCAN:
            self._num_consts, self._num_carry = versions.scan_lengths(eqn)
        else:
            self._ends = eqn.params["cond_jaxpr"]
            self._before = eqn.params["cond_nconsts"]
            self._num_consts = eqn.params["body_nconsts"]
            self._num_carry = len(eqn.outvars)
        pairs = zip(inputs, eqn.invars, strict=True)
        self._inputs = [jaxprs.as_array(x, of) for x, of in pairs]

    def operands(self, results: Collection[int]) -> list[Var]:
        """The variables outside that some results need."""
        carry, read = self._needed(results)
        inside = self._body.jaxpr.invars[: self._num_consts]
        found = {k for k, x in enumerate(inside) if x in read}
        found.update(self._num_consts + k for k in carry)
        start = self._num_consts + self._num_carry
        over = self._body.jaxpr.invars[start:]
        found.update(start + k for k, x in enumerate(over) if x in read)
        outside = self._eqn.invars
        atoms = [*outside[: self._before], *(outside[self._before + k] for k in found)]
        return [*filter(jaxprs.is_variable, atoms)]

    def _needed(self, results: Collection[int]) -> tuple[list[int], set[Var]]:
        """The positions in the carry, and the variables that the body reads."""
        body, wanted, read = self._body.jaxpr, {*results}, set[Any]()
        if self._ends is not None:
            jaxpr = self._ends.jaxpr
            eqns = jaxprs.needed(jaxprs.all_equations(jaxpr), jaxpr.outvars)
            before = {*jaxprs.variables_read(eqns), *jaxpr.outvars}
            carry = jaxpr.invars[self._before :]
            wanted.update(k for k, x in enumerate(carry) if x in before)
        count = -1
        while count != len(wanted):
            count = len(wanted)
            atoms = [body.outvars[k] for k in wanted]
            eqns = jaxprs.needed(jaxprs.all_equations(body), atoms)
            read = {*jaxprs.variables_read(eqns), *filter(jaxprs.is_variable, atoms)}
            carry = body.invars[self._num_consts :][: self._num_carry]
            wanted.update(k for k, x in enumerate(carry) if x in read)
        return sorted(k for k in wanted if k < self._num_carry), read

    def results(self, wanted: Sequence[int]) -> list[Any]:
        """Some of its results."""
        carry, read = self._needed(wanted)
        body, consts = self._body.jaxpr, [*self._body.consts]
        inputs, start = self._inputs[self._before :], self._num_consts
        atoms = [body.outvars[k] for k in carry]
        over = [k for k in wanted if k >= self._num_carry]
        stacked = [body.outvars[k] for k in over]
        eqns = jaxprs.needed(jaxprs.all_equations(body), [*atoms, *stacked])
        known = dict[Any, Any](zip(body.constvars, consts, strict=True))
        known |= zip(body.invars[:start], inputs[:start], strict=True)
        first = [inputs[start + k] for k in carry]
        others = range(start + self._num_carry, len(body.invars))
        sliced = [k for k in others if body.invars[k] in read]
        variables = [body.invars[start + k] for k in carry]

        def step(now: list[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            env = known | dict(zip(variables, now, strict=True))
            env |= zip((body.invars[k] for k in sliced), slices, strict=True)
            jaxprs.advance(eqns, env)
            pairs = zip(
                (*atoms, *stacked), jaxprs.read(env, [*atoms, *stacked]), strict=True
            )
            made = [jaxprs.as_array(x, of) for of, x in pairs]
            return made[: len(carry)], made[len(carry) :]

        ys = list[Any]()
        if self._ends is None:
            xs = [inputs[k] for k in sliced]
            options = {k: self._eqn.params[k] for k in ("length", "reverse", "unroll")}
            last, ys = jax.lax.scan(step, first, xs, **options)
        else:
            last = jax.lax.while_loop(
                lambda now: self._goes_on(carry, now),
                lambda now: step(now, ())[0],
                first,
            )
        found = dict(zip((*carry, *over), (*last, *ys), strict=True))
        return [found[k] for k in wanted]

    def _goes_on(self, carry: Sequence[int], now: Sequence[Any]) -> Any:
        assert self._ends is not None
        jaxpr = self._ends.jaxpr
        env = dict[Any, Any](zip(jaxpr.constvars, self._ends.consts, strict=True))
        env |= zip(jaxpr.invars[: self._before], self._inputs, strict=False)
        env |= zip((jaxpr.invars[self._before + k] for k in carry), now, strict=True)
        eqns = jaxprs.needed(jaxprs.all_equations(jaxpr), jaxpr.outvars)
        jaxprs.advance(eqns, env)
        (goes_on,) = jaxprs.read(env, jaxpr.outvars)
        return goes_on
