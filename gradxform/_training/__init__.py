"""The verbs of a training loop: compute, apply, minimize.

- ``lookup``: the function of that name reads rows of a table, and ``value_and_grad``
  gives a gradient for these rows alone.
- ``readings``: finds out which rows of its tables a loss reads, in any code.
- ``apply``: ``apply_updates``; ``apply_gradients``, which puts a gate around the whole
  step; and ``minimize``, which makes all of it one compiled function.
- ``donation``: copies shared arrays before they are donated.
- ``local_steps``: many such steps of one worker, and their total change of the
  parameters as a pseudo-gradient.

Imports ``_trees`` and ``_late``.
"""
