"""The loop over the layers of a scan, which reads one layer of its stacks at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._devices import host
from gradxform._layers import tpu
from gradxform._layers.stacks import Scan, StackVariable
from gradxform._numbers import arithmetic
from gradxform._trees.types import ByIndex

# The indices of layers: a constant, or an array that waits for something.
LayerIndices: TypeAlias = np.ndarray | jax.Array


def over_layers(
    scan: Scan,
    inputs: Sequence[Any],
    stacks: ByIndex,
    layer_results: Callable[[list[Any]], list[jax.Array]],
    *,
    keeps_carries: bool = False,
    given_back: Mapping[int, StackVariable] | None = None,
    chosen: jax.Array | None = None,
) -> tuple[list[jax.Array], ByIndex, list[jax.Array]]:
    """The results of a scan, its stacks, and the carry of each layer.

    ``inputs`` has None for stacks. ``layer_results(operands)`` are the results of the
    body. A layer of a stack on the host comes while others are computed. The carries
    with which layers begin are for a backward pass. Results in ``given_back``, by their
    positions, are written into stacks, and are not among the results. ``chosen`` says
    for which examples of a batch.
    """
    num_consts, num_carry = scan.lengths
    start = num_consts + num_carry  # Of the inputs that the scan goes over.
    load = functools.partial(read_layers, scan)

    def layer(carried: Any, x: Any) -> tuple[Any, Any]:
        (carry, stacks, ahead), (i, following, scanned) = carried, x
        there = {n: stacks[n] for n in used_first}
        others = {n: x for n, x in stacks.items() if n not in there}
        parts, others = read_on(scan, others, i)
        parts |= tpu.now(load, there, i, ahead)
        operands = scan.with_layers([*inputs[:num_consts], *carry, *scanned], parts)
        results = layer_results(operands)
        new = {v.index: v.part(results[k]) for k, v in written.items()}
        stacks = write_layers(scan, others | there, new, i, chosen)
        there = {n: stacks[n] for n in used_first}
        kept = results[:num_carry], stacks, tpu.ahead(load, there, following)
        ys = [x for k, x in enumerate(results) if k >= num_carry and k not in written]
        return kept, (carry if keeps_carries else [], ys)

    written = given_back or {}

    on_host = [n for n in tpu.backwards(scan) if host.is_on_host(stacks[n])]
    # The first part of a layer comes while the layer before it is computed, others
    # while the layer itself is.
    used_first = on_host[-1:]
    each = layer_indices(scan)
    first, following = one_ahead(each, reverse=scan.is_reverse)
    ahead = tpu.ahead(load, {n: stacks[n] for n in used_first}, first)
    (last, stacks, _), (carries, ys) = jax.lax.scan(
        layer,
        (list(inputs[num_consts:start]), stacks, ahead),
        (each, following, list(inputs[start:])),
        reverse=scan.is_reverse,
    )
    return [*last, *ys], stacks, carries


def read_layers(scan: Scan, stacks: ByIndex, i: jax.Array) -> ByIndex:
    """Layer ``i`` of these stacks."""
    stacked = scan.stacked
    return {n: stacked[n].read(x, i) for n, x in stacks.items()}


def read_on(scan: Scan, stacks: ByIndex, i: jax.Array) -> tuple[ByIndex, ByIndex]:
    """Layer ``i`` of these stacks, and the stacks for a loop that only reads them."""
    stacked = scan.stacked
    found = {n: stacked[n].read_on(x, i) for n, x in stacks.items()}
    return {n: x for n, (x, _) in found.items()}, {n: x for n, (_, x) in found.items()}


def write_layers(
    scan: Scan, stacks: ByIndex, new: ByIndex, i: jax.Array, chosen: jax.Array | None
) -> ByIndex:
    """Stacks with new layers ``i``; of a batch, for the chosen examples."""
    written: ByIndex = {}
    for n, part in new.items():
        at, old = scan.stacked[n], stacks[n]
        if chosen is None:
            written[n] = at.write(old, part, i)
            continue
        is_chosen = arithmetic.expand(chosen, part)
        written[n] = at.write(old, jnp.where(is_chosen, part, at.read(old, i)), i)
    return stacks | written


def layer_indices(scan: Scan) -> np.ndarray:
    """int32[n], the indices of a scan's layers, as a constant.

    XLA for GPU then knows where each layer lies, and copies it to or from the host. An
    array of JAX is known only to the program: there a kernel moves each layer.
    """
    return np.arange(scan.length, dtype=np.int32)


def one_ahead(each: LayerIndices, *, reverse: bool) -> tuple[Any, LayerIndices]:
    """The first layer of a loop, and for each layer the one after it.

    After the last one comes the first one again, which is read for nothing.
    """
    roll = np.roll if isinstance(each, np.ndarray) else jnp.roll
    return each[-1 if reverse else 0], roll(each, 1 if reverse else -1)
