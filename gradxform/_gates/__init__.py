"""Decides whether a push acts: wrappers that drop, add up or hold back gradients.

A gate is a function that decides and runs nothing. ``gate`` alone runs what it has
decided, in one conditional that holds all that a push may do. So a skipped push copies
nothing.

- ``gate``: the decision about a push, and the conditional that follows it.
- ``conditional``: a conditional whose two sides may differ in type.
- ``missing``: what happens to a leaf without a gradient.
- ``counters``: the counters of gates; ``global_step`` and ``staleness_fraction``.
- ``drop_stale``: drops gradients that come too late.
- ``skip_spikes``: skips a step whose loss or norm is a spike.
- ``worker_mean``: for workers whose data differ, with a row for each.
- ``delayed``: applies gradients a fixed number of steps late.
- ``sums``: adds up pushes until there are enough, and makes one step of them.
- ``accumulator``: the gate around such sums for several workers, some of them late.
- ``accumulate``: the gate around such sums for micro-batches, which all count.
"""
