"""Decides whether a gradient may act, and what lateness does to it.

A wrapper here is a gate. Its ``guard`` says once when a push acts, and leaves open what
acting produces: ``update`` fills in updates, ``apply_gradients`` the whole step with
the new parameters. So one conditional holds all that a push may do, and a push that may
not act copies nothing.

- ``gate``: the idea, and the conditional whose sides need not agree in type.
- ``absent``: leaves without a gradient, and transformations that know no ``None``.
- ``drop_stale``: the gate that drops gradients that come too late.
- ``worker_mean``: the gate for workers whose data differ, with a row for each.
- ``delayed``: gradients that act a fixed number of steps late, in an ordinary loop.
- ``scale_by_staleness``, ``compensate_delay``: links for its inside, which make a late
  gradient smaller or correct it.
- ``counters``: ``global_step`` and ``staleness_fraction`` of a state.
- ``sums``: adds up pushes until there are enough, and makes one step of them.
- ``accumulator``: the gate around that for several workers, some of them late.
- ``accumulate``: the gate for micro-batches, which all count.

Imports ``_trees``.
"""
