"""What a gradient tree may hold, and what can be done with it.

A leaf is an array, ``None`` where the loss gave no gradient, or the few rows of a table
that a batch has touched. Whoever writes a transformation meets all three, and need not
know: the maps here take every kind of leaf, in any dtype, wherever it lies.

- ``rows``: row numbers of tables, and the rows that they stand for.
- ``indexed_slices``: the row-sparse leaf, and part of a table.
- ``maps``: maps over trees and casts, ``f(values)`` or ``f(values, state)``.
- ``boxes``: those in which Flax names the mesh axes of an array.
- ``linear``: linear operations that are carried out in another way on CPU.
- ``rounding``: a cast to half precision that costs no copy of its result.
- ``norms``: sums of squares of layers, rows and whole trees in one pass.
- ``mesh``: what of a sum lies on other devices, inside ``shard_map``.
- ``versions``: what JAX names otherwise from one version to the next.
- ``checks``: errors that name the argument, the path, what was given and what to do.

A transformation without state then is one line of arithmetic and this one:

>>> import jax.numpy as jnp
>>> from gradxform._trees import maps
>>> from gradxform._trees.indexed_slices import IndexedSlices
>>> updates = {"w": jnp.ones(2), "frozen": None}
>>> updates["table"] = IndexedSlices([3], jnp.ones((1, 2)), (5, 2))
>>> halved = maps.map_updates(lambda g: maps.scale(g, 0.5), updates)
>>> assert halved["table"].values.tolist() == [[0.5, 0.5]] and halved["frozen"] is None

Nothing here imports another wing.
"""
