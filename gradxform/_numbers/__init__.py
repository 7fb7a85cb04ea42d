"""Calculates with the leaves of a gradient tree.

- ``arithmetic``: sums, products and roots that are rounded once, from at least float32.
- ``constants``: zeros and other constants, which lie where the parameters lie.
- ``norms``: sums of squares of layers, rows and whole trees in one pass.
- ``lateness``: how many steps late a gradient is; ``workers``: who computed it.
- ``apply_updates``: adds updates to parameters.

With these, a transformation without state is one line of arithmetic and one map:

>>> import gradxform as gx, jax.numpy as jnp
>>> from gradxform._numbers import arithmetic
>>> from gradxform._trees import maps
>>> updates = {"w": jnp.ones(2), "frozen": None}
>>> updates["table"] = gx.IndexedSlices([3], jnp.ones((1, 2)), (5, 2))
>>> halved = maps.map_updates(lambda g: arithmetic.scale(g, 0.5), updates)
>>> assert halved["table"].values.tolist() == [[0.5, 0.5]] and halved["frozen"] is None
"""
