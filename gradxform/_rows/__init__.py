"""Row sparsity, and all that knows it.

``indexed_slices`` is a gradient of some rows, and ``table_rows`` a part of a table
among parameters. ``opaque`` hides the row numbers from functions for dense arrays.
``rows`` reads and writes rows. ``boundary`` shows arrays to everything outside.

``lookup`` reads tables so that their gradients are row-sparse, and ``readings`` finds
what a loss reads. ``lazy`` lets any transformation work on the touched rows, and
``by_row`` evaluates its update for them. ``densify`` makes arrays of the gradients.

Imports ``_trees``.
"""
