"""The verbs of a training loop: compute, apply, minimize.

- ``apply``: ``apply_updates``; ``apply_gradients``, which puts a gate around the whole
  step; and ``minimize``, which makes all of it one compiled function.
- ``donation``: copies shared arrays before they are donated.
- ``local_steps``: many such steps of one worker, and their total change of the
  parameters as a pseudo-gradient.
"""
