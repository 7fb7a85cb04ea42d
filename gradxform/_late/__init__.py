"""Decides whether a gradient is applied, and what lateness does to it.

A wrapper here is a gate: a function that decides and runs nothing. ``gate`` alone runs
what it has decided, in one conditional that holds all that a push may do. So a skipped
push copies nothing.

- ``gate``: the decision about a push, and the conditional that follows it.
- ``conditional``: a conditional whose two sides may differ in type.
- ``skip_spikes``: the gate that skips a step whose loss or norm is a spike.
- ``missing``: what happens to a leaf without a gradient.
- ``drop_stale``: the gate that drops gradients that come too late.
- ``worker_mean``: the gate for workers whose data differ, with a row for each.
- ``delayed``: gradients that are applied a fixed number of steps late.
- ``lateness``: how late a gradient is, whether that is too late, what it then counts.
- ``scale_by_staleness``, ``compensate_delay``: links to put inside a gate; they make a
  late gradient smaller, or correct it.
- ``workers``: the extra argument that says who has pushed.
- ``counters``: finds the states of gates; ``global_step`` and ``staleness_fraction``.
- ``sums``: adds up pushes until there are enough, and makes one step of them.
- ``accumulator``: the gate around such sums for several workers, some of them late.
- ``accumulate``: the gate around such sums for micro-batches, which all count.

Imports ``_trees`` and ``_rows``.
"""
