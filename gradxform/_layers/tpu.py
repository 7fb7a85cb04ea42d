"""What a TPU needs to move layers beside arithmetic; none of it ran on a TPU.

Its compiler gives the order in which a program moves layers between the memories. With
this order a step takes 1.2 times its arithmetic, at 32 GB/s and 8,192 tokens, and not
1.5 times. That is a schedule, played with a bandwidth, and no measurement. Programs for
other platforms are as without this module.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gradxform._devices import host
from gradxform._jax import compilers, programs
from gradxform._layers.stacks import Scan
from gradxform._numbers import constants
from gradxform._trees import maps
from gradxform._trees.types import PyTree, T


def backwards(scan: Scan) -> list[int]:
    """The indices of a scan's stacks, in the order in which gradients are known.

    The body has used a stack for the first time when its gradient is complete.
    """
    body = programs.program(scan.eqn).jaxpr
    uses = [
        (programs.first_use(body, k), stack.index) for k, stack in scan.stacks.items()
    ]
    # A stack may be several inputs. Its first use counts.
    return [*dict.fromkeys(n for _, n in sorted(uses))][::-1]


def ahead(
    read: Callable[[dict[int, jax.Array], jax.Array], dict[int, jax.Array]],
    stacks: dict[int, jax.Array],
    i: jax.Array,
) -> dict[int, jax.Array]:
    """Layer ``i`` of stacks on the host, for a loop for TPU to carry.

    Loops for others carry zeros, which nobody reads. If a loop carries a layer, XLA for
    GPU copies the whole stacks in each turn.
    """
    if not stacks:
        return {}
    types = jax.make_jaxpr(read)(stacks, i).out_avals

    def zeros(*_: object) -> dict[int, jax.Array]:
        zeros = map(constants.zeros_of_type, types)
        return dict(zip(sorted(stacks), zeros, strict=True))

    return compilers.on_tpu(read, zeros)(stacks, i)


def now(
    read: Callable[[dict[int, jax.Array], jax.Array], dict[int, jax.Array]],
    stacks: dict[int, jax.Array],
    i: jax.Array,
    carried: dict[int, jax.Array],
) -> dict[int, jax.Array]:
    """Layer ``i`` of stacks on the host; a loop for TPU has carried it."""
    if not stacks:
        return {}
    return compilers.on_tpu(
        lambda stacks, i, carried: carried, lambda stacks, i, carried: read(stacks, i)
    )(stacks, i, carried)


def written_in_order(
    wholes: Mapping[int, jax.Array],
    order: Callable[[int], int],
    write: Callable[[dict[int, jax.Array]], dict[int, jax.Array]],
) -> dict[int, jax.Array]:
    """``write(wholes)``, in the order in which the gradients of a layer are known.

    If nothing ordered the writes, the compiler would compute some gradients at the end,
    and then wait for their writes.
    """
    done: dict[int, jax.Array] = {}
    last: dict[int, jax.Array] = {}
    for _, group in itertools.groupby(sorted(wholes, key=order), order):
        after = functools.partial(_after, last)
        last = write({n: after(wholes[n]) for n in group})
        done |= last
    return done


def _after(before: dict[int, jax.Array], x: jax.Array) -> jax.Array:
    """``x``, with which the compiler does nothing before others are known.

    A GPU would wait for what moves to the host.
    """
    barrier: Callable[..., Any] = compilers.barrier
    return compilers.on_tpu(barrier, lambda x: x)((x, before))[0]


def with_bytes(f: Callable[..., T], *args: PyTree[Any]) -> T:
    """``f(*args)``, whose arguments' arrays of 8 bits may be on the host.

    They come whole in front of it, unless the compiler can take layers of them.
    """

    def bring(x: Any) -> Any:  # Any leaf.
        moves = host.is_on_host(x) and host.moves_whole_on_tpu(x)
        return host.to_device(x) if moves else x

    def brought(*args: PyTree[Any]) -> T:
        return f(*maps.map_leaves(bring, args))

    there = filter(host.is_on_host, jax.tree.leaves(args))
    if not any(map(host.moves_whole_on_tpu, there)):
        return f(*args)
    return compilers.on_tpu(brought, f)(*args)
