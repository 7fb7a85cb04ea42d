"""The leaves that a gradient tree may hold, and maps over them.

A leaf is an array, ``None`` where the loss gave no gradient, or the few rows of a table
that a batch has touched. The maps here take every kind of leaf, in any dtype, on any
device, so a transformation need not know about the kinds.

- ``types``: names for what a gradient tree holds, for annotations.
- ``maps``: maps over trees, ``f(values)`` or ``f(values, state)``.
- ``boxes``: trees with and without boxes, Flax's wrappers that name mesh axes.
- ``dtypes``: dtypes to calculate in, and numbers in them.
- ``placeholders``: whose state a leaf of a state is, as ``init`` shows it.
- ``states``: a mark on the class of a state, as that of a gate; finds gates.
- ``extra_args``: which keywords a function and a transformation take.
- ``links``: a transformation from a function of its updates, or of its state too.

Nothing here imports another subpackage.
"""
