"""What a training loop says: compute, apply, minimize.

- ``lookup``: the function of that name reads rows of a table, and ``value_and_grad``
  gives those rows as its gradient.
- ``readings``: which rows of its tables a loss reads, whoever it is that reads them.
- ``apply``: ``apply_updates``, ``apply_gradients``, which leads a gate around the whole
  step, and ``minimize``, which makes all of it one compiled function.
- ``donation``: what somebody else holds as well is copied before it is donated.
- ``local_steps``: many of those steps, and how far they came as a pseudo-gradient.

Imports ``_trees`` and ``_late``.
"""
