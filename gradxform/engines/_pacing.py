"""Rules that say when a worker may begin its next gradient: ``Job.pace``.

A rule that drops late gradients loses what slow workers, or long tasks, would have
taught. A rule here lets workers wait instead, so that less comes late. It is a
function ``pace(progress) -> bool``; any function of that kind is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gradxform._checks import arguments


class Progress(NamedTuple):
    """What a rule sees when it is asked about one worker.

    Attributes:
      worker: the index of the worker that asks.
      clocks: how many gradients of each worker were answered, for the workers that are
        there. A worker that joins others begins with the lowest clock among them.
      local_steps: for each gradient under way, the global step when it began. Its local
        step is that one, or a later one: on :func:`threads` and :func:`ray` it pulls a
        moment later.
      global_step: how many steps the server has made.
      accumulated: pushes accepted since then, which have not become a step yet.
      started: gradients that were begun, and were accepted or are under way. Those that
        were dropped, lost or cancelled leave it again.
    """

    worker: int
    clocks: Mapping[int, int]
    local_steps: tuple[int, ...]
    global_step: int
    accumulated: int
    started: int


class Alike(functools.partial[bool]):
    """A rule that decides alike about workers with equal clocks.

    While others begin, and nobody is answered, its refusals last.
    """


def stale_synchronous(slack: float) -> Callable[[Progress], bool]:
    """No worker is more than ``slack`` gradients ahead of the slowest.

    Worker i begins if ``clocks[i] - min(clocks) <= slack``. With 0 all workers compute
    in rounds. A slow worker's gradients count as much as the others', but all others
    wait for it.

    Args:
      slack: how many gradients, in [0, inf].

    References:
      Ho et al., `More Effective Distributed ML via a Stale Synchronous Parallel
      Parameter Server <https://papers.nips.cc/paper/4894>`_, 2013.

    >>> from gradxform import engines
    >>> pace = engines.stale_synchronous(slack=1)
    >>> state = engines.Progress(
    ...     worker=0, clocks={0: 5, 1: 4}, local_steps=(7,), global_step=9,
    ...     accumulated=0, started=10,
    ... )
    >>> pace(state), pace(state._replace(clocks={0: 6, 1: 4}))
    (True, False)
    """
    slack = float(arguments.in_range("slack", slack, "[0, inf]"))

    def pace(progress: Progress) -> bool:
        clocks = progress.clocks
        return clocks[progress.worker] - min(clocks.values()) <= slack

    return Alike(pace)


def bounded_staleness(
    max_staleness: float, num_required: int = 1
) -> Callable[[Progress], bool]:
    r"""No push is more than ``max_staleness`` steps late, and none is dropped for it.

    A gradient begins if nothing is under way, or if

    .. math:: k + \lfloor (a + r) / B \rfloor - \min_j l_j \leq S

    with :math:`S` the bound, :math:`B` the pushes that make a step, :math:`k` the
    global step, :math:`a` the pushes accumulated since, and :math:`l_j` the local steps
    of the :math:`r` gradients under way. The left side is the staleness of the oldest
    gradient if all others, and the new one, are pushed before it.

    Args:
      max_staleness: the bound, in [0, inf].
      num_required: how many pushes make a step, ≥ 1. A smaller number than the true one
        keeps the bound, too, but lets more workers wait.

    References:
      Li et al., `Communication Efficient Distributed Machine Learning with the
      Parameter Server <https://papers.nips.cc/paper/5597>`_, 2014: bounded delay.

    >>> from gradxform import engines
    >>> pace = engines.bounded_staleness(max_staleness=2)
    >>> state = engines.Progress(
    ...     worker=0, clocks={0: 5, 1: 4}, local_steps=(8,), global_step=9,
    ...     accumulated=0, started=10,
    ... )
    >>> pace(state), pace(state._replace(local_steps=(8, 9)))
    (True, False)
    """
    most = float(arguments.in_range("max_staleness", max_staleness, "[0, inf]"))
    arguments.in_range("num_required", num_required, "[1, inf)", integer=True)

    def pace(progress: Progress) -> bool:
        local_steps = progress.local_steps
        if not local_steps:
            return True
        ahead = (progress.accumulated + len(local_steps)) // num_required
        return progress.global_step + ahead - min(local_steps) <= most

    return Alike(pace)


def admission(
    max_staleness: float, max_concurrent: float, num_required: int = 1
) -> Callable[[Progress], bool]:
    r"""At most so many gradients are begun as the next ``max_staleness`` steps take.

    A gradient begins if

    .. math:: \min(C - r,\; (S + k + 1) B - n) > 0

    with :math:`C` the most gradients under way at once, :math:`r` those under way,
    :math:`S` the staleness, :math:`k` the global step, :math:`B` the pushes that make a
    step, and :math:`n` the gradients that were accepted or are under way.

    This bounds the mean staleness and not that of each push: a gradient that takes long
    comes later than ``max_staleness``, while others take its place.

    Args:
      max_staleness: S, in [0, inf].
      max_concurrent: C, in [1, inf].
      num_required: B, ≥ 1.

    References:
      Fu et al., `AReaL: A Large-Scale Asynchronous Reinforcement Learning System
      <https://arxiv.org/abs/2505.24298>`_, 2025; its ``StalenessManager``.

    >>> from gradxform import engines
    >>> pace = engines.admission(max_staleness=1, max_concurrent=8)
    >>> state = engines.Progress(
    ...     worker=0, clocks={0: 5, 1: 4}, local_steps=(8,), global_step=9,
    ...     accumulated=0, started=10,
    ... )
    >>> pace(state), pace(state._replace(started=11))
    (True, False)
    """
    late = float(arguments.in_range("max_staleness", max_staleness, "[0, inf]"))
    most = float(arguments.in_range("max_concurrent", max_concurrent, "[1, inf]"))
    arguments.in_range("num_required", num_required, "[1, inf)", integer=True)

    def pace(progress: Progress) -> bool:
        free = most - len(progress.local_steps)
        room = (late + progress.global_step + 1) * num_required - progress.started
        return min(free, room) > 0

    return Alike(pace)
