"""The leaves that a gradient tree may hold, and the operations on them.

A leaf is an array, ``None`` where the loss gave no gradient, or the few rows of a table
that a batch has touched. The maps here take every kind of leaf, in any dtype, on any
device, so a transformation need not know about the kinds.

- ``types``: names for what a gradient tree holds, for annotations.
- ``maps``: maps over trees, ``f(values)`` or ``f(values, state)``.
- ``apply_updates``: adds updates to parameters.
- ``boxes``: trees with and without boxes, Flax's wrappers that name mesh axes.
- ``dtypes``: dtypes to calculate in, and numbers in them.
- ``arithmetic``: sums, products and roots that are rounded once, from at least float32.
- ``constants``: zeros and other constants, which lie where the parameters lie.
- ``compilers``: other forms of an operation for CPU, GPU or TPU, as barriers.
- ``host``: arrays in the host's memory: ``on_host``, and how a step gets at them.
- ``placeholders``: whose state a leaf of a state is, as ``init`` shows it.
- ``jaxprs``: reads jaxprs, evaluates one by a rule for its equations.
- ``slices``: evaluates a jaxpr for some slices of arrays, as rows or layers, by the
  table in ``slice_rules``. ``slice_kinds`` says which leaves have them.
- ``extra_args``: which extra arguments a transformation takes.
- ``norms``: sums of squares of layers, rows and whole trees in one pass.
- ``stateless``: a transformation from a function of its updates.
- ``mesh``: sums over devices, inside ``shard_map``.
- ``versions``: names that JAX changes from one version to the next.
- ``checks``: errors that name the argument, the path, what was given and what to do.

With these, a transformation without state is one line of arithmetic and one map:

>>> import gradxform as gx, jax.numpy as jnp
>>> from gradxform._trees import arithmetic, maps
>>> updates = {"w": jnp.ones(2), "frozen": None}
>>> updates["table"] = gx.IndexedSlices([3], jnp.ones((1, 2)), (5, 2))
>>> halved = maps.map_updates(lambda g: arithmetic.scale(g, 0.5), updates)
>>> assert halved["table"].values.tolist() == [[0.5, 0.5]] and halved["frozen"] is None

Nothing here imports another subpackage.
"""
