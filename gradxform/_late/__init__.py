"""What lateness does to a gradient: links to put inside a gate.

- ``lateness``: how late a gradient is, whether that is too late, what it then counts.
- ``scale_by_staleness``, ``compensate_delay``: they make a late gradient smaller, or
  correct it.
- ``workers``: the extra argument that says who has pushed.

Imports ``_trees``, ``_jax``, ``_checks``, ``_devices``, ``_numbers`` and ``_rows``.
"""
